"""`hpcmoe watch [RUN...]`: all runs, live, in a terminal of 80 columns or more. Never imports torch or Hydra."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hpcmoe.cli.keys import Keys, single_keys
from hpcmoe.cli.words import Parser, add_json
from hpcmoe.errors import UserError
from hpcmoe.runs.board import Board, Line
from hpcmoe.runs.control import LogTail, cancel
from hpcmoe.runs.notify import send_due
from hpcmoe.runs.registry import find_run, run_dirs, runs_root
from hpcmoe.runs.rundir import RunDir

if TYPE_CHECKING:
    from rich.console import RenderableType

INTERVAL_S, LEAST_INTERVAL_S = 10.0, 1.0
DRAW_EVERY_S = 1.0
NARROWEST = 80
PAGE = 10
LAST_BYTES = 8192  # of a log that is followed


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="hpcmoe watch",
        description="Show all runs (or those named), live.",
        epilog="keys: j/k or arrows select, l or Enter follows the log of rank 0, c cancels (asks first), q leaves",
    )
    parser.add_argument("runs", metavar="RUN", nargs="*", help="run ids, unique prefixes, or 'latest'; all runs when left out")
    parser.add_argument("--once", action="store_true", help="print the table once and leave")
    parser.add_argument("--interval", type=float, default=INTERVAL_S, metavar="S", help="seconds between two looks (default 10)")
    add_json(parser)
    args = parser.parse_args(argv)
    if not args.interval >= LEAST_INTERVAL_S:
        raise UserError(f"--interval {args.interval:g}: at least {LEAST_INTERVAL_S:g} s, so that Slurm is left in peace")
    named = [find_run(word) for word in args.runs]
    board = Board(lambda: named or run_dirs(runs_root()), None if named else runs_root())
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if args.json and not args.once and terminal:
        raise UserError("--json goes with --once: a live view is not a document")
    if args.once or args.json or not terminal:
        if not args.once:
            print("hpcmoe: no terminal here, so this is one look, as with --once", file=sys.stderr)
        return once(board, args.json)
    return Live(board, args.interval).run()


def once(board: Board, as_json: bool) -> int:
    now = time.time()
    lines = board.poll(now, patient=False)
    send_due([line.view for line in lines], now, lambda line: print(f"hpcmoe: {line}", file=sys.stderr))
    if as_json:
        print(json.dumps({"t": now, "runs": [line.as_json() for line in lines]}, indent=2))
        return 0
    from rich.console import Console

    from hpcmoe.cli.screen import frame

    width = shutil.get_terminal_size((NARROWEST, 24)).columns
    Console(width=width, highlight=False, soft_wrap=False).print(frame(lines, now, width, rows=max(1, len(lines))))
    return 0


class Live:
    """The live view. A thread of its own looks at directories and Slurm, so that keys work while Slurm is slow."""

    def __init__(self, board: Board, interval_s: float) -> None:
        self._board, self._interval_s = board, interval_s
        self._lines: list[Line] | None = None
        self._chosen: str | None = None  # run id: rows move
        self._says = "looking ..."
        self._asks: RunDir | None = None  # whether to cancel this one
        self._over, self._look_now = threading.Event(), threading.Event()
        self._at_work: list[threading.Thread] = []

    def run(self) -> int:
        from rich.console import Console
        from rich.live import Live as Screen

        console = Console(highlight=False)
        looker = threading.Thread(target=self._look, daemon=True)
        looker.start()
        try:
            with single_keys() as keys:
                while True:
                    with Screen(console=console, screen=True, auto_refresh=False) as screen:
                        follow = self._until_key(keys, lambda: screen.update(self._frame(), refresh=True))
                    if follow is None:
                        break
                    _follow_log(follow, keys)
        except KeyboardInterrupt:
            pass
        finally:
            self._over.set()
            self._look_now.set()
        for worker in self._at_work:
            if worker.is_alive():
                print("waiting for Slurm to take the cancellation ...", file=sys.stderr)
            worker.join()
        return 0

    def _look(self) -> None:
        while not self._over.is_set():
            self._look_now.clear()
            try:
                now = time.time()
                self._lines = self._board.poll(now)
                self._says = "" if self._says == "looking ..." else self._says
                send_due([line.view for line in self._lines], now, self._say)
            except Exception as error:  # the screen must say so, and go on: the next look may do better
                self._says = f"this look failed: {type(error).__name__}: {error}"
            self._look_now.wait(self._interval_s)

    def _say(self, line: str) -> None:
        self._says = line

    def _frame(self) -> RenderableType:
        from hpcmoe.cli.screen import AROUND_THE_ROWS, frame

        width, height = shutil.get_terminal_size()
        lines = self._lines or []
        return frame(lines, time.time(), width, max(1, height - AROUND_THE_ROWS - 1), self._index(), self._says)

    def _index(self) -> int:
        """Where the chosen run stands now; the first one when it is gone."""
        ids = [line.run.run_id for line in self._lines or []]
        return ids.index(self._chosen) if self._chosen in ids else 0

    def _until_key(self, keys: Keys, draw: Callable[[], None]) -> RunDir | None:
        """Draw and obey until q (None) or until a log is asked for (its run)."""
        while True:
            draw()
            key = keys.next(DRAW_EVERY_S)
            if key is None:
                continue
            if self._asks is not None:
                self._answer(key)
            elif key == "q":
                return None
            elif key in ("l", "enter") and self._lines:
                return self._run(self._index())
            elif key == "c" and self._lines:
                self._ask(self._lines[self._index()])
            else:
                self._move({"up": -1, "k": -1, "down": 1, "j": 1, "page up": -PAGE, "page down": PAGE}.get(key, 0))

    def _run(self, index: int) -> RunDir:
        assert self._lines is not None
        return self._lines[index].view.record.run

    def _move(self, by: int) -> None:
        lines = self._lines or []
        if by and lines:
            self._chosen = lines[min(max(0, self._index() + by), len(lines) - 1)].run.run_id
            self._says = ""

    def _ask(self, line: Line) -> None:
        self._chosen = line.run.run_id
        if line.view.final:
            self._says = f"run {line.run.run_id} is {line.run.state} already; there is nothing to cancel"
            return
        self._asks = line.view.record.run
        self._says = f"end run {line.run.run_id} ({line.run.state}, job {line.run.job_id or '-'}) for good? y/n"

    def _answer(self, key: str) -> None:
        run, self._asks = self._asks, None
        assert run is not None
        if key not in ("y", "Y"):
            self._says = f"run {run.run_id} goes on"
            return
        self._says = f"run {run.run_id} is told to end ..."
        worker = threading.Thread(target=self._cancel, args=(run,))
        self._at_work.append(worker)
        worker.start()

    def _cancel(self, run: RunDir) -> None:
        try:
            view = cancel(run)
            self._says = f"run {run.run_id} is {view.state}; `hpcmoe resume {run.run_id}` would continue it"
        except (UserError, OSError) as error:
            self._says = " ".join(str(error).split())
        self._look_now.set()


def _follow_log(run: RunDir, keys: Keys) -> None:
    """The log of rank 0 on the plain terminal, until a key is pressed."""

    def emit(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    emit(f"--- run {run.run_id}, rank 0; q or Enter goes back ---\n")
    tail = LogTail(run, 0, emit, LAST_BYTES)  # a night's log would scroll by for minutes
    tail.pump()
    while keys.next(DRAW_EVERY_S) not in ("q", "enter", "escape", "l"):
        tail.pump()
