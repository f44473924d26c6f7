"""Looking after runs from a login node: one or some to their ends (`wait`, `submit --wait`), or all that are open (`supervise`).

What is done for a run is hpcmoe.runs.bring_back's. Nothing here must be remembered: whoever is killed may be started again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcmoe.errors import UserError
from hpcmoe.locks import file_lock
from hpcmoe.runs.bring_back import Deed, help_on
from hpcmoe.runs.control import LogTail
from hpcmoe.runs.glance import Glancer
from hpcmoe.runs.life import JobView
from hpcmoe.runs.notify import send_due
from hpcmoe.runs.observe import RunView, observe
from hpcmoe.runs.observe import view as view_of
from hpcmoe.runs.registry import run_dirs
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.store import read_record, result_state
from hpcmoe.runs.sweep import SweepDir
from hpcmoe.runs.sweep_life import anything_to_do

LOOK_EVERY_S = 1.0  # at the run directory
# At Slurm: often while something is about to happen, then seldom, so that a follower for a night costs the controller nothing.
ASK_FIRST_S, ASK_MOST_S, ASK_GROWTH = 2.0, 30.0, 1.3
FORGOTTEN_S = 120.0  # a job that Slurm does not know for so long will not come back

EXIT_CODES = {"COMPLETED": 0, "FAILED": 1, "CANCELLED": 3, "STOPPED": 4, "UNKNOWN": 5}
BY_URGENCY = ("COMPLETED", "CANCELLED", "STOPPED", "UNKNOWN", "FAILED")


def supervise(run: RunDir, say: Callable[[str], None], tail: LogTail | None = None) -> RunView:
    """Block until the run is COMPLETED, FAILED, CANCELLED or STOPPED (or Slurm has forgotten it: UNKNOWN)."""
    return supervise_all([run], say, tail)[0]


def supervise_all(
    runs: Sequence[RunDir], say: Callable[[str], None], tail: LogTail | None = None, sweep: SweepDir | None = None
) -> list[RunView]:
    """Block until all of ``runs`` are over, asking Slurm about them together; returns their last views, in the same order.

    ``sweep``: of which these are runs; it is gone on with meanwhile.
    """
    follower = {run.run_id: _Follower(run, say) for run in runs}
    ends: dict[str, RunView] = {}
    ask_every = ASK_FIRST_S
    while True:
        still = [run for run in runs if run.run_id not in ends]
        news = False
        for deed in _go_on(sweep) if sweep is not None else ():
            say(str(deed["text"]))
            news = True
        seen = observe([read_record(run) for run in still])
        send_due(seen, time.time(), say)
        for run, now in zip(still, seen, strict=True):
            news |= follower[run.run_id].tell(now)
            if tail is not None:
                tail.pump()
            if not follower[run.run_id].help_on(now):
                ends[run.run_id] = now
        if len(ends) == len(follower) and sweep is not None:
            for deed in _go_on(sweep):
                say(str(deed["text"]))
            for run_id in _promoted(ends.values()):
                del ends[run_id]
        if len(ends) == len(follower):
            return [ends[run.run_id] for run in runs]
        ask_every = ASK_FIRST_S if news else ask_every
        _watch_directories([run for run in still if run.run_id not in ends], ask_every, tail)
        ask_every = min(ASK_MOST_S, ask_every * ASK_GROWTH)


def _promoted(views: Iterable[RunView]) -> list[str]:
    """Ids of the runs that had paused at a rung of their sweep, and do no longer."""
    paused = [view.record.run for view in views if view.record.life.paused_at is not None]
    return [run.run_id for run in paused if read_record(run).life.paused_at is None]


def worst_exit_code(views: Iterable[RunView]) -> int:
    """The exit code of the state that needs a person most: of a sweep's runs one may have FAILED and another be STOPPED."""
    return EXIT_CODES[max((view.state for view in views), key=BY_URGENCY.index, default="COMPLETED")]


class _Follower:
    """What supervising one run must remember between two looks at it."""

    def __init__(self, run: RunDir, say: Callable[[str], None]) -> None:
        self._run, self._say = run, say
        self._last_said = ""
        self._unknown_from: float | None = None

    def tell(self, now: RunView) -> bool:
        """Say how the run is, if that is new. True when it was."""
        line = _headline(now)
        new = line != self._last_said
        if new:
            self._say(line)
        self._last_said = line
        return new

    def help_on(self, now: RunView) -> bool:
        """Do for the run what Slurm would leave undone. False when it is over, or nothing more can be done."""
        if now.state == "UNKNOWN" and now.job.reachable:
            self._unknown_from = self._unknown_from or time.monotonic()
        else:
            self._unknown_from = None
        if now.record.finished is not None:
            return False
        if self._unknown_from is not None and time.monotonic() - self._unknown_from > FORGOTTEN_S:
            return False
        return help_on(now, lambda deed: self._say(str(deed["text"]))) and not now.final


def _headline(now: RunView) -> str:
    record = now.record
    job = f" (job {record.job_id})" if record.job_id else ""
    reason = f": {now.reason}" if now.reason and now.reason != "None" else ""
    return f"run {record.run.run_id} is {now.state}{job}{reason}"


def _watch_directories(runs: Sequence[RunDir], seconds: float, tail: LogTail | None) -> None:
    """Sleep until Slurm is due, but wake early when a journal grows: it tells of ends sooner than a poll would."""
    deadline = time.monotonic() + seconds
    sizes = [_size(run) for run in runs]
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(LOOK_EVERY_S, left))
        if tail is not None:
            tail.pump()
        if [_size(run) for run in runs] != sizes:
            return


def _size(run: RunDir) -> int:
    try:
        return run.journal.stat().st_size
    except OSError:
        return -1


# ---- all runs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """What one round of a supervisor found and did."""

    open_runs: int
    deeds: list[Deed]
    problem: str | None = None  # why Slurm could not be asked

    def as_json(self) -> dict[str, Any]:
        return {"open_runs": self.open_runs, "deeds": self.deeds, "problem": self.problem}


def keep(root: Path, interval_s: float, once: bool, tell: Callable[[Round], None]) -> bool:
    """Look after all runs below ``root``, a round every ``interval_s``; with ``once``, one round. False: another one does so."""
    with file_lock(root / ".supervise.lock") as mine:
        if not mine:
            return False
        glancer = Glancer(root)
        while True:
            tell(one_round(root, glancer))
            if once:
                return True
            time.sleep(interval_s)


def one_round(root: Path, glancer: Glancer) -> Round:
    """Ask Slurm about all open runs together, help those that need it, tell people of the others' ends.

    One run's trouble is not another's.
    """
    records = glancer.read_all(run_dirs(root))
    over = [record for record in records if record.life.ended is not None]
    views = observe([record for record in records if record.life.ended is None and result_state(record.run) is None])
    deeds: list[Deed] = []
    for view in views:
        run_id = view.record.run.run_id
        try:
            help_on(view, deeds.append)
        except (UserError, OSError, AssertionError, KeyError, TypeError) as error:
            text = f"run {run_id} could not be helped: {error}"
            deeds.append({"run_id": run_id, "did": "not_helped", "text": text, "problem": str(error)})
    paused = [record for record in over if record.life.paused_at is not None]
    open_or_paused = [*(view.record for view in views), *paused]
    for path in sorted({str(record.planned["sweep"]) for record in open_or_paused if record.planned.get("sweep")}):
        deeds += _go_on(SweepDir(Path(path)))
    now = time.time()
    send_due([*views, *(view_of(record, JobView(), now) for record in over)], now, lambda text: deeds.append(_not_told(text)))
    return Round(len(views), deeds, next((view.job.problem for view in views if not view.job.reachable), None))


def _go_on(sweep: SweepDir) -> list[Deed]:
    """Submit what the sweep holds back, where there is room for it now. A sweep's trouble is no other's."""
    try:
        if not anything_to_do(sweep):
            return []
        from hpcmoe.runs.advance import advance

        return [{"run_id": None, "sweep_id": sweep.sweep_id, "did": "advanced", "text": line} for line in advance(sweep)]
    except (UserError, OSError, LookupError, TypeError, ValueError) as error:
        text = f"sweep {sweep.path.name} could not be gone on with: {error}"
        return [{"run_id": None, "sweep_id": sweep.path.name, "did": "not_advanced", "text": text, "problem": str(error)}]


def _not_told(text: str) -> Deed:
    return {"run_id": text.split()[1].rstrip(":"), "did": "not_told", "text": text}
