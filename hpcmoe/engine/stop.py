"""Hearing that the run must save and leave. Signals only set a flag; what to do about it is the trainer's, agreed by all ranks.

Stdlib only: the handlers are installed before torch is imported, so that a signal during start-up is not lost.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

HEARD = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


class StopSignals:
    """Which of the stop signals this process has heard."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def install(self, signals: Iterable[signal.Signals] = HEARD) -> StopSignals:
        for number in signals:
            signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.heard.append(signal.Signals(number).name)


class ControlFiles:
    """What people ask by dropping files into control/, and the batch shell by touching notice. Looked at by rank 0 only."""

    def __init__(self, control: Path, notice: Path) -> None:
        self.save_file, self.stop_file, self.notice = control / "save", control / "stop", notice

    def save_asked(self) -> bool:
        return self.save_file.exists()

    def stop_asked(self) -> bool:
        return self.stop_file.exists()

    def noticed(self) -> bool:
        return self.notice.exists()

    def save_done(self) -> None:
        self.save_file.unlink(missing_ok=True)


@dataclass(frozen=True)
class Asked:
    """What one rank knows of a stop request."""

    signal: bool  # by a signal here or, on rank 0, to the batch shell
    control: bool  # by a person; rank 0 only


def asked_to_stop(signals: StopSignals, control: ControlFiles | None) -> Asked:
    """``control``: rank 0's. Two file look-ups there, none elsewhere."""
    if control is None:
        return Asked(bool(signals.heard), False)
    return Asked(bool(signals.heard) or control.noticed(), control.stop_asked())
