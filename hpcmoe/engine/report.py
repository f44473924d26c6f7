"""What rank 0 says about steps and evaluations: a line in metrics.jsonl, TensorBoard scalars, a progress line for people.

Reads figures, decides nothing; losses never depend on it.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcmoe.config.schema import Config
from hpcmoe.engine.agreement import Agreed
from hpcmoe.engine.callbacks.callback import Evaluated
from hpcmoe.engine.checkpoint import Progress
from hpcmoe.engine.peak import Peak
from hpcmoe.engine.schedule import learning_rate
from hpcmoe.models.accounting import Convention, flops_per_token

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


CONVENTION: Convention = "titan"
SCALARS = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu", "aux_loss", "expert_max_over_mean", "batch_tokens", "skipped_steps")


@dataclass(frozen=True)
class StepFigures:
    """One line of metrics.jsonl. Floats are written so that reading gives the same bits back; null: not finite."""

    step: int
    loss: float  # mean cross entropy of the step's tokens, nats
    tokens: int  # since the run began
    batch_tokens: int  # of this step
    skipped: str | None  # why weights and moments stayed as they were; None: they did not
    skipped_steps: int  # since the run began
    grad_norm: float  # before clipping
    lr: float
    tokens_per_s: float  # all ranks
    mfu: float | None  # 0 .. 1; None: no peak known
    flops_convention: str
    peak_tflops: float | None  # all ranks
    precision: str
    aux_loss: float  # mean over MoE layers, 1 when balanced
    z_loss: float
    expert_max_over_mean: float  # the busiest expert's load over the mean, worst layer
    seconds: float
    attempt: str
    t: float  # epoch seconds
    eval_step: int | None = None  # an evaluation since the line before this one: after which step it was,
    eval_loss: float | None = None  # and the mean cross entropy of the held-out tokens, nats


def figures_of(
    config: Config, peak: Peak, attempt: str, progress: Progress, agreed: Agreed, seconds: float, skipped: str | None
) -> StepFigures:
    """The step that ``progress`` has just counted; it took ``seconds``."""
    rate = agreed.tokens / seconds
    flops = flops_per_token(config.model, config.train.seq_len, CONVENTION) * rate
    layers, _ = agreed.counts_LE.shape
    balance = (agreed.counts_LE.amax(-1) / agreed.counts_LE.mean(-1)).max().item() if layers else 1.0
    return StepFigures(
        step=progress.step,
        loss=agreed.loss,
        tokens=progress.tokens,
        batch_tokens=agreed.tokens,
        skipped=skipped,
        skipped_steps=progress.skipped,
        grad_norm=agreed.grad_norm,
        lr=learning_rate(progress.step, config.train.steps, config.optim),
        tokens_per_s=rate,
        mfu=None if peak.tflops is None else flops / (peak.tflops * 1e12),
        flops_convention=CONVENTION,
        peak_tflops=peak.tflops,
        precision=peak.precision,
        aux_loss=agreed.aux / max(1, layers),
        z_loss=agreed.z / max(1, layers),
        expert_max_over_mean=balance,
        seconds=seconds,
        attempt=attempt,
        t=time.time(),
    )


class Reporter:
    def __init__(self, metrics: Path, tensorboard: Path | None, first_step: int, steps: int, interval: int, peak: Peak) -> None:
        self.steps, self.interval, self.peak = steps, interval, peak
        self._fd = os.open(metrics, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self._fd).st_size
        self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"  # an earlier attempt was killed inside its line
        self._kept = b""  # not written yet
        self._tensorboard, self._first_step = tensorboard, first_step
        self._writer: SummaryWriter | None = None
        self._evaluated: Evaluated | None = None  # and not written yet
        self._pace: float | None = None  # seconds a step, smoothed; the first step, which warms up, does not count

    def tell(self, figures: StepFigures) -> None:
        """To people: the progress line, TensorBoard."""
        if figures.step > self._first_step:
            self._pace = figures.seconds if self._pace is None else 0.9 * self._pace + 0.1 * figures.seconds
        if figures.step % self.interval == 0 or figures.step == self.steps or figures.skipped:
            print(self._progress(figures), flush=True)
        self._scalars({f"train/{name}": getattr(figures, name) for name in SCALARS}, figures.step, figures.t)

    def write(self, figures: StepFigures) -> None:
        """To metrics.jsonl: one line, with the evaluation since the line before it."""
        if self._evaluated is not None:
            figures = replace(figures, eval_step=self._evaluated.step, eval_loss=self._evaluated.loss)
            self._evaluated = None
        self._line(asdict(figures))

    def evaluation(self, result: Evaluated) -> None:
        """Told at once; written with the step whose line is next: readers of that file find steps only."""
        self._evaluated = result
        print(
            f"evaluation after step {result.step} · loss {result.loss:.4f} · {quantity(result.tokens)} tokens, held out · "
            f"{duration(result.seconds)}",
            flush=True,
        )
        self._scalars({"eval/loss": result.loss}, result.step, time.time())

    def _line(self, values: dict[str, Any]) -> None:
        """One write; JSON has no infinity and no NaN. What a full disk does not take is kept and comes first next time."""
        known = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()}
        self._kept += (("\n" if self._torn else "") + json.dumps(known, allow_nan=False) + "\n").encode()
        self._torn = False
        self._write_kept()

    def _write_kept(self) -> None:
        try:
            while self._kept:
                self._kept = self._kept[os.write(self._fd, self._kept) :]
        except OSError as error:
            print(f"metrics cannot be written ({error}); {len(self._kept)} bytes wait", file=sys.stderr, flush=True)

    def _progress(self, f: StepFigures) -> str:
        mfu = "MFU unknown" if f.mfu is None else f"MFU {100 * f.mfu:.1f} % ({f.flops_convention}, {self.peak})"
        left = duration((self.steps - f.step) * (self._pace or f.seconds))
        skipped = f" · SKIPPED: {f.skipped} ({f.skipped_steps} so far)" if f.skipped else ""
        return (
            f"step {f.step}/{self.steps} · loss {f.loss:.4f} · {quantity(f.tokens_per_s)} tokens/s · {mfu} · "
            f"experts max/mean {f.expert_max_over_mean:.2f} · grad {f.grad_norm:.2f} · {left} left{skipped}"
        )

    def _scalars(self, values: dict[str, float | None], step: int, walltime: float) -> None:
        if self._tensorboard is None:
            return
        try:
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter  # a second of imports, only where it is used

                # steps that are redone after a resume replace the earlier attempt's
                self._writer = SummaryWriter(str(self._tensorboard), purge_step=self._first_step, flush_secs=30)
            for name, value in values.items():
                if value is not None:
                    self._writer.add_scalar(name, value, step, walltime=walltime)
        except OSError as error:
            self._tensorboard, self._writer = None, None
            print(f"no more TensorBoard scalars from this attempt: {error}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Everything is as durable as the disk lets it be."""
        self._write_kept()
        try:
            if self._writer is not None:
                self._writer.close()
            os.fsync(self._fd)
            os.close(self._fd)
        except OSError as error:
            print(f"metrics may be incomplete: {error}", file=sys.stderr, flush=True)


def quantity(value: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
