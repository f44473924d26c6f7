"""Which callbacks a run has, in the order in which they are called."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from hpcmoe.engine.callbacks.callback import Callback
from hpcmoe.engine.callbacks.certificate import Certificate
from hpcmoe.engine.callbacks.evaluation import Evaluation
from hpcmoe.engine.callbacks.halving import Halving, Judge
from hpcmoe.engine.callbacks.profiler import Profiler
from hpcmoe.engine.callbacks.skip import SkipStep
from hpcmoe.engine.callbacks.straggler import Straggler
from hpcmoe.engine.callbacks.watchdog import Watchdog
from hpcmoe.engine.schedule import batch_tokens
from hpcmoe.engine.trainer import Trainer
from hpcmoe.runs.halving import Mode
from hpcmoe.runs.journal import Journal, read_journal
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.rungs import passed_rungs, sweep_dir_of


def build_callbacks(
    trainer: Trainer, rank: int, folder: Path, watchdog: Watchdog | None = None, nodes: Sequence[str] = ()
) -> list[Callback]:
    """Those that ``trainer``'s config asks for.

    ``folder``: the attempt's; ``watchdog``: there since the process began; ``nodes``: each rank's.
    """
    config, checkpointer = trainer.config, trainer.checkpointer
    journal = trainer.lead.journal if trainer.lead is not None else None
    callbacks: list[Callback] = [] if watchdog is None else [watchdog]
    if trainer.lead is not None:
        callbacks.append(_certificate(trainer, trainer.lead.journal))
        if len(nodes) > 1:
            callbacks.append(Straggler(trainer.lead.journal, nodes, trainer.device.type, trainer.sizes.pp))
    callbacks.append(SkipStep(config.train.skip, journal, lambda: checkpointer.saved_step, config.optim.lr))
    profiler = config.logging.profiler
    if profiler.first_step is not None and rank in profiler.ranks:
        callbacks.append(Profiler(profiler, folder, rank))
    if config.evaluation.interval:
        callbacks.append(_evaluation(trainer, watchdog))
    if config.sweep.halving.first_rung is not None:
        judge = _judge(trainer, journal) if journal is not None else None
        callbacks.append(Halving(config.sweep.halving, config.train.steps, trainer.device, judge))
    return callbacks


def _judge(trainer: Trainer, journal: Journal) -> Judge | None:
    """None: the run is in no sweep, and goes on at every rung."""
    events = read_journal(journal.path)
    sweep_dir, halving = sweep_dir_of(events), trainer.config.sweep.halving
    if sweep_dir is None:
        return None
    run_id, mode = journal.path.parent.name, cast(Mode, halving.mode)
    return Judge(sweep_dir, run_id, trainer.attempt, journal, halving.eta, mode, passed_rungs(events))


def _certificate(trainer: Trainer, journal: Journal) -> Certificate:
    train, loader, progress = trainer.config.train, trainer.loader, trainer.progress

    def next_ids() -> list[int]:
        return loader.ids(progress.position, batch_tokens(progress.tokens, train) // train.seq_len)

    return Certificate(journal, RunDir(journal.path.parent).metrics, train.deterministic, next_ids)


def _evaluation(trainer: Trainer, watchdog: Watchdog | None) -> Evaluation:
    evaluation = Evaluation(
        config=trainer.config.evaluation,
        steps=trainer.config.train.steps,
        compute=trainer.compute,
        loader=trainer.loader,
        sizes=trainer.sizes,
        data_rank=trainer.data_rank,
        device=trainer.device,
        signals=trainer.signals,
        control=trainer.lead.control if trainer.lead is not None else None,
    )
    if watchdog is not None:
        evaluation.tell_phase = watchdog.entering
    return evaluation
