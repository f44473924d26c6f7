"""Single key presses from a terminal, for `hpcmoe watch`. Restores the terminal however it is left."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

# What terminals send for the keys that are not one byte; both cursor modes.
_NAMES = {
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\r": "enter",
    b"\n": "enter",
    b"\x1b": "escape",
    b"\x04": "q",
}


class Keys:
    """Key presses of the terminal on file descriptor ``fd``, which must be in cbreak mode."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._waiting: list[str] = []

    def next(self, timeout_s: float) -> str | None:
        """The next key: a character, or a name such as "up"; None after ``timeout_s``; "q" when the terminal is gone."""
        if not self._waiting:
            if not select.select([self._fd], [], [], timeout_s)[0]:
                return None
            data = os.read(self._fd, 1024)
            self._waiting = keys_in(data) if data else ["q"]
        return self._waiting.pop(0) if self._waiting else None


def keys_in(data: bytes) -> list[str]:
    """What was typed, key by key; sequences of other keys are passed over."""
    keys: list[str] = []
    while data:
        sequence = next((known for known in sorted(_NAMES, key=len, reverse=True) if data.startswith(known)), None)
        if sequence == b"\x1b" and len(data) > 1:
            data = _after_sequence(data)
        elif sequence is not None:
            keys.append(_NAMES[sequence])
            data = data[len(sequence) :]
        else:
            keys.append(data[:1].decode("latin-1"))
            data = data[1:]
    return keys


def _after_sequence(data: bytes) -> bytes:
    """Past an escape sequence that we give no name: ESC [ parameters letter, ESC O letter, or Alt with a key (ECMA-48)."""
    if data[1:2] not in (b"[", b"O"):
        return data[2:]
    for index, byte in enumerate(data[2:], 2):
        if 0x40 <= byte <= 0x7E:
            return data[index + 1 :]
    return b""


@contextmanager
def single_keys() -> Iterator[Keys]:
    """Keys as they are pressed, without echo; Ctrl-C stays an interrupt."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield Keys(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
