"""What rank 0 says about each step: a line in metrics.jsonl, TensorBoard scalars, a progress line for people.

Reads figures, decides nothing; losses never depend on it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcmoe.engine.peak import Peak

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@dataclass(frozen=True)
class StepFigures:
    """One line of metrics.jsonl. Floats are written so that reading gives the same bits back."""

    step: int
    loss: float  # mean cross entropy of the step's tokens, nats
    tokens: int  # since the run began
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


class Reporter:
    def __init__(self, metrics: Path, tensorboard: Path | None, first_step: int, steps: int, interval: int, peak: Peak) -> None:
        self.steps, self.interval, self.peak = steps, interval, peak
        self._fd = os.open(metrics, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self._fd).st_size
        self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"  # an earlier attempt was killed inside its line
        self._tensorboard, self._first_step = tensorboard, first_step
        self._writer: SummaryWriter | None = None
        self._pace: float | None = None  # seconds a step, smoothed; the first step, which warms up, does not count

    def step(self, figures: StepFigures) -> None:
        line = json.dumps(asdict(figures)) + "\n"
        os.write(self._fd, (("\n" if self._torn else "") + line).encode())
        self._torn = False
        if figures.step > self._first_step:
            self._pace = figures.seconds if self._pace is None else 0.9 * self._pace + 0.1 * figures.seconds
        if figures.step % self.interval == 0 or figures.step == self.steps:
            print(self._progress(figures), flush=True)
        if self._tensorboard is not None:
            self._scalars(figures)

    def _progress(self, f: StepFigures) -> str:
        mfu = "MFU unknown" if f.mfu is None else f"MFU {100 * f.mfu:.1f} % ({f.flops_convention}, {self.peak})"
        left = duration((self.steps - f.step) * (self._pace or f.seconds))
        return (
            f"step {f.step}/{self.steps} · loss {f.loss:.4f} · {quantity(f.tokens_per_s)} tokens/s · {mfu} · "
            f"experts max/mean {f.expert_max_over_mean:.2f} · grad {f.grad_norm:.2f} · {left} left"
        )

    def _scalars(self, f: StepFigures) -> None:
        assert self._tensorboard is not None
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # a second of imports, only where it is used

            # steps that are redone after a resume replace the earlier attempt's
            self._writer = SummaryWriter(str(self._tensorboard), purge_step=self._first_step, flush_secs=30)
        for name in ("loss", "grad_norm", "lr", "tokens_per_s", "mfu", "aux_loss", "expert_max_over_mean"):
            value = getattr(f, name)
            if value is not None:
                self._writer.add_scalar(f"train/{name}", value, f.step, walltime=f.t)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        os.fsync(self._fd)
        os.close(self._fd)


def quantity(value: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
