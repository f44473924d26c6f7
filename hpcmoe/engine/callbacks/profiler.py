"""A window of steps under PyTorch's profiler: one trace a chosen rank, in the attempt's directory. Opens in Perfetto."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from hpcmoe.config.schema import ProfilerConfig
from hpcmoe.engine.agreement import Agreed
from hpcmoe.engine.callbacks.callback import NOTHING, Callback, Told


class Profiler(Callback):
    """From before step ``first_step`` to after the window's last step, or to the run's end if that comes first.

    A run that starts behind ``first_step`` has nothing left to trace.
    """

    name = "profiler"

    def __init__(self, config: ProfilerConfig, folder: Path, rank: int) -> None:
        assert config.first_step is not None
        self.config, self.folder, self.rank, self.first = config, folder, rank, config.first_step
        self._profile: profile | None = None
        self._last = 0

    def before_step(self, step: int) -> None:
        if step == self.first:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            self._profile = profile(activities=activities, record_shapes=True)
            self._profile.start()
        self._last = step

    def after_step(self, step: int, agreed: Agreed, skipped: str | None) -> Told:
        if self._profile is not None and step == self.first + self.config.steps - 1:
            self._write()
        return NOTHING

    def close(self) -> None:
        if self._profile is not None:
            self._write()

    def _write(self) -> None:
        """A trace that cannot be written, or that is too large, costs the run nothing but a line."""
        assert self._profile is not None
        traced, self._profile = self._profile, None
        traced.stop()
        path = self.folder / f"profile-rank{self.rank:04d}-steps-{self.first}-{self._last}.json.gz"
        try:
            traced.export_chrome_trace(str(path))
            megabytes = path.stat().st_size / 1e6
            if megabytes > self.config.max_mb:
                path.unlink()
                raise OSError(f"{megabytes:.0f} MB are above logging.profiler.max_mb={self.config.max_mb}; trace fewer steps")
        except (OSError, RuntimeError) as error:
            print(f"rank {self.rank}: no profile: {error}", file=sys.stderr, flush=True)
        else:
            print(f"rank {self.rank}: profile of steps {self.first} to {self._last} in {path}", flush=True)
