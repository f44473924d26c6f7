"""Which callbacks a run has, in the order in which they are called."""

from __future__ import annotations

import torch

from hpcmoe.config.schema import Config
from hpcmoe.data.loader import Loader
from hpcmoe.engine.callbacks.callback import Callback
from hpcmoe.engine.callbacks.evaluation import Evaluation
from hpcmoe.engine.callbacks.skip import SkipStep
from hpcmoe.engine.callbacks.watchdog import Watchdog
from hpcmoe.engine.checkpoint import Checkpointer
from hpcmoe.engine.compute import Compute
from hpcmoe.engine.stop import ControlFiles, StopSignals
from hpcmoe.engine.support import Sizes
from hpcmoe.runs.journal import Journal


def build_callbacks(
    config: Config,
    sizes: Sizes,
    data_rank: int,
    device: torch.device,
    compute: Compute,
    loader: Loader,
    checkpointer: Checkpointer,
    signals: StopSignals,
    control: ControlFiles | None,
    journal: Journal | None,
    watchdog: Watchdog | None,
) -> list[Callback]:
    """``control`` and ``journal``: rank 0's. ``watchdog`` has been there since the process began."""
    callbacks: list[Callback] = [] if watchdog is None else [watchdog]
    callbacks.append(SkipStep(config.train.skip, journal, lambda: checkpointer.saved_step, config.optim.lr))
    if config.evaluation.interval:
        evaluation = Evaluation(
            config.evaluation, config.train.steps, compute, loader, sizes, data_rank, device, signals, control
        )
        if watchdog is not None:
            evaluation.tell_phase = watchdog.entering
        callbacks.append(evaluation)
    return callbacks
