"""A sweep goes on: what is held back follows when there is room, one throttle holds over all arrays, failures stop it.

Slurm is played by a queue in this process.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcmoe.config.compose import load
from hpcmoe.config.schema import Config
from hpcmoe.config.validate import validate
from hpcmoe.errors import UserError
from hpcmoe.locks import file_lock
from hpcmoe.runs import advance as advancing
from hpcmoe.runs.advance import advance, advance_once
from hpcmoe.runs.after import advance_after, sweep_of
from hpcmoe.runs.control import make_ready
from hpcmoe.runs.create import Membership, create_run
from hpcmoe.runs.glance import Glancer
from hpcmoe.runs.halving import Reached
from hpcmoe.runs.jobspec import JobSpec, job_shape
from hpcmoe.runs.journal import Journal, read_journal
from hpcmoe.runs.life import fold
from hpcmoe.runs.rungs import NAME, passed_rungs, write_rung
from hpcmoe.runs.store import finish, read_record
from hpcmoe.runs.supervise import one_round
from hpcmoe.runs.sweep import SweepDir, SweepPoint, create_sweep
from hpcmoe.runs.sweep_life import anything_to_do, life_of
from hpcmoe.slurm import client
from hpcmoe.slurm.command import SlurmRejected, SlurmUnreachable
from hpcmoe.slurm.limits import MyJob, SubmitLimit
from hydra_plugins import hpcmoe_launchers as launchers

FULL = (
    "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates accounting/QOS policy"
)


class Queue:
    """A Slurm that takes at most ``most`` elements of this user."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.jobs: dict[str, MyJob] = {}
        self.specs: list[JobSpec] = []
        self.scontrol: list[tuple[str, str, object]] = []
        self.cancelled: list[str] = []
        self.most: int | None = None
        self.told = True  # accounting tells the limit
        self.error: Exception | None = None
        monkeypatch.setattr(advancing, "my_jobs", lambda user: list(self.jobs.values()))
        monkeypatch.setattr(advancing, "submit_limits", lambda *_: self.limits())
        facts = replace(client.read_cluster(""), max_array_size=11)
        monkeypatch.setattr(client, "cluster_facts", lambda: facts)
        monkeypatch.setattr(client, "limit_array", lambda job, most: self.scontrol.append(("limit", job, most)))
        monkeypatch.setattr(client, "hold", lambda job: self.scontrol.append(("hold", job, None)))
        monkeypatch.setattr(client, "release", lambda job: self.scontrol.append(("release", job, None)))
        monkeypatch.setattr(client, "cancel", self.cancelled.extend)
        monkeypatch.setattr(launchers, "executor_for", lambda *_: SimpleNamespace(submit_run=self.submit))
        monkeypatch.setattr("hpcmoe.runs.arrays.find_submitted", self.find)

    def limits(self) -> list[SubmitLimit]:
        return [SubmitLimit(self.most, "MaxSubmitJobs of account a")] if self.most is not None and self.told else []

    def submit(self, spec: JobSpec) -> list[str]:
        if self.error is not None and not isinstance(self.error, SlurmUnreachable):
            raise self.error
        if self.most is not None and len(self.jobs) + len(spec.run_dirs) > self.most:
            raise SlurmRejected("Job violates accounting/QOS policy", FULL)
        self.specs.append(spec)
        job = str(40 + len(self.specs))
        ids = [f"{job}_{task}" for task in range(len(spec.run_dirs))] if spec.is_array else [job]
        self.jobs |= {job_id: MyJob(job_id, "PENDING", comment=f"hpcmoe:{spec.token}") for job_id in ids}
        if self.error is not None:
            raise self.error
        return ids

    def find(self, token: str) -> str | None:
        return next((job.job for job in self.jobs.values() if job.comment == f"hpcmoe:{token}"), None)

    def start(self, *job_ids: str) -> None:
        self.jobs |= {job_id: replace(self.jobs[job_id], state="RUNNING") for job_id in job_ids}

    def end(self, *job_ids: str) -> None:
        for job_id in job_ids:
            del self.jobs[job_id]


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    return Queue(monkeypatch)


@pytest.fixture(scope="module")
def config() -> Config:
    return validate(load(["cluster=testbed"]))


@pytest.fixture
def make(tmp_path: Path, config: Config) -> Callable[..., SweepDir]:
    def make(*sizes: int, **policy: object) -> SweepDir:
        """A sweep whose points, of as many shapes as there are sizes, wait to be submitted."""
        root = tmp_path / "runs"
        sweep = create_sweep(root / "sweeps" / "one", launcher="hpcmoe", policy=policy, root=root, scheduler="slurm")
        points: list[SweepPoint] = []
        for number, size in enumerate(sizes):
            own = replace(config, slurm=replace(config.slurm, time=f"{number + 1}:00:00"))
            for _ in range(size):
                index = len(points)
                run = create_run(own, [f"x={index}"], root, Membership(sweep.path, index, sweep.shared), f"k{index}")
                points.append(SweepPoint(index, (f"x={index}",), f"k{index}", run.run_id, shape=job_shape(own)))
        sweep.append_points(points)
        return sweep

    return make


def lines(sweep: SweepDir, name: str) -> list[dict[str, object]]:
    return [event for event in sweep.read_events() if event["event"] == name]


def test_a_run_of_a_sweep_is_five_files_at_most_before_it_starts(make: Callable[..., SweepDir], queue: Queue) -> None:
    sweep = make(3)
    advance(sweep)
    for run in sweep.runs():
        assert len([run.path, *run.path.rglob("*")]) <= 5, sorted(run.path.rglob("*"))
        assert read_record(run).planned["sweep"] == str(sweep.path)
        assert sweep_of(run) == sweep


def test_arrays_are_as_large_as_the_site_allows_and_every_run_knows_its_element(
    make: Callable[..., SweepDir], queue: Queue
) -> None:
    sweep = make(13)
    said = advance(sweep)
    assert [len(spec.run_dirs) for spec in queue.specs] == [11, 2]
    assert [fold(read_journal(run.journal)).job_id for run in sweep.runs()] == [f"41_{n}" for n in range(11)] + ["42_0", "42_1"]
    assert said == ["sweep one: 11 of its points submitted as job 41", "sweep one: 2 of its points submitted as job 42"]
    assert advance(sweep) == []
    assert not anything_to_do(sweep)


@pytest.mark.parametrize("told", [True, False])
def test_what_the_user_may_not_submit_yet_follows_as_jobs_end(make: Callable[..., SweepDir], queue: Queue, told: bool) -> None:
    """Whether accounting tells the limit, or only sbatch's refusal."""
    queue.most, queue.told = 8, told
    sweep = make(10)
    said = advance(sweep)
    submitted = len(queue.jobs)
    assert 5 <= submitted <= 8
    assert "held back" in said[-1]
    waiting = [run for run in sweep.runs() if read_record(run).job_id is None]
    assert len(waiting) == 10 - submitted
    queue.end(*list(queue.jobs)[:5])
    advance(sweep)
    assert [run for run in sweep.runs() if read_record(run).job_id is None] == []
    assert sum(len(spec.run_dirs) for spec in queue.specs) == 10


def test_the_last_element_to_leave_sees_to_what_is_held_back(make: Callable[..., SweepDir], queue: Queue) -> None:
    sweep = make(2, 2, throttle=1)
    advance(sweep)
    assert [(len(spec.run_dirs), spec.at_once) for spec in queue.specs] == [(2, 1)]
    queue.end("41_0")
    queue.start("41_1")
    finish(sweep.runs()[1], "COMPLETED", None)
    advance_after(sweep.runs()[1], leaving="41_1")
    assert [(len(spec.run_dirs), spec.at_once, spec.dependency) for spec in queue.specs[1:]] == [(2, 1, "afterany:41_1")]


def test_the_throttle_is_shared_and_goes_to_those_that_still_need_it(make: Callable[..., SweepDir], queue: Queue) -> None:
    sweep = make(4, 4, throttle=5)
    advance(sweep)
    assert [spec.at_once for spec in queue.specs] == [3, 2]
    queue.end("41_0", "41_1")
    queue.start("41_2", "41_3", "42_0", "42_1")
    advance(sweep)
    assert queue.scontrol == [("limit", "42", 3)]
    advance(sweep)
    assert queue.scontrol == [("limit", "42", 3)]
    sweep.journal("throttle", to=1)
    advance(sweep)
    assert queue.scontrol[1:] == [("limit", "41", 1), ("hold", "42", None)]
    sweep.journal("throttle", to=None)
    advance(sweep)
    assert queue.scontrol[3:] == [("limit", "41", None), ("limit", "42", None), ("release", "42", None)]


@pytest.mark.parametrize("how", ["drain", "stop"])
def test_too_many_failures_stop_a_sweep(make: Callable[..., SweepDir], queue: Queue, how: str) -> None:
    queue.most = 4
    sweep = make(6, max_failures=0, on_max_failures=how)
    advance(sweep)
    runs = sweep.runs()
    queue.start("41_0", "41_1")
    for run in runs[:2]:
        run.attempts.mkdir()
    finish(runs[0], "FAILED", "it raised")
    advance_after(runs[0], leaving="41_0")
    assert queue.cancelled == ["41_[2-3]"]
    states = [(record.finished or {}).get("state") for record in map(read_record, runs)]
    assert states == ["FAILED", None, "STOPPED", "STOPPED", "STOPPED", "STOPPED"]
    assert (runs[1].control / "stop").exists() == (how == "stop")
    queue.end("41_0", "41_2", "41_3")
    assert advance(sweep) == []
    for run in [runs[0], *runs[2:]]:
        make_ready(run)
    sweep.journal("resumed", points=[0, 2, 3, 4, 5])
    advance(sweep)
    assert [str(run.path) in map(str, queue.specs[1].run_dirs) for run in runs] == [True, False, True, True, False, False]
    assert [event["how"] for event in read_journal(runs[0].journal) if event["event"] == "submitted"] == ["sweep", "resume"]


def test_a_lost_answer_is_looked_for_and_nothing_is_submitted_twice(make: Callable[..., SweepDir], queue: Queue) -> None:
    sweep = make(3)
    queue.error = SlurmUnreachable("Socket timed out", maybe_done=True)
    done = advance_once(sweep)
    assert "Socket timed out" in str(done.unknown)
    queue.error = None
    advance(sweep)
    assert len(queue.specs) == 1
    assert [read_record(run).job_id for run in sweep.runs()] == ["41_0", "41_1", "41_2"]
    assert not anything_to_do(sweep)


def test_a_submission_that_never_reached_slurm_is_made_again(make: Callable[..., SweepDir], queue: Queue) -> None:
    sweep = make(2)
    token = f"{sweep.runs()[0].run_id}-s0"
    sweep.journal("submitting", token=token, part=0, points=[0, 1], writer=f"{advancing.os.uname().nodename}:1:0:dead")
    Journal(sweep.runs()[0].journal).append("submitting", token=token, how="sweep", writer="h:1:0:dead", task=0)
    advance(sweep)
    assert [read_record(run).job_id for run in sweep.runs()] == ["41_0", "41_1"]


def test_a_refusal_for_good_reason_is_told_and_not_asked_again_at_once(make: Callable[..., SweepDir], queue: Queue) -> None:
    sweep = make(2)
    queue.error = SlurmRejected("invalid partition specified: nono")
    assert advance_once(sweep).refused == dict.fromkeys([0, 1], "invalid partition specified: nono")
    queue.error = None
    assert advance(sweep) == []
    assert queue.specs == []


def test_a_run_that_its_user_submitted_or_cancelled_alone_is_left_out(make: Callable[..., SweepDir], queue: Queue) -> None:
    sweep = make(4)
    runs = sweep.runs()
    Journal(runs[1].journal).append("submitted", job_id="7", how="resume")
    finish(runs[2], "CANCELLED", "cancelled by its user")
    advance(sweep)
    advance(sweep)
    assert [spec.run_dirs for spec in queue.specs] == [(runs[0].path, runs[3].path)]
    assert life_of(sweep).waiting(sweep.read_points()) == []


def test_of_several_at_once_one_acts_and_it_sees_what_the_others_came_for(make: Callable[..., SweepDir], queue: Queue) -> None:
    queue.most = 2
    sweep = make(3)
    advance(sweep)
    with file_lock(sweep.lock) as mine:
        assert mine
        queue.end("41_0")
        assert advance(sweep) == []  # leaves it to the one that holds the lock
    assert len(queue.specs) == 1
    assert re.fullmatch(r"\.+", sweep.asked.read_text())


def test_a_sweep_that_cannot_go_on_does_not_fail_the_run_that_ends(
    make: Callable[..., SweepDir], capsys: pytest.CaptureFixture
) -> None:
    sweep = make(1)
    (run,) = sweep.runs()
    sweep.facts_file.write_text("[]")
    advance_after(run, "7")
    assert "is left for a supervisor" in capsys.readouterr().err
    with pytest.raises(UserError, match="no sweep"):
        advance(SweepDir(sweep.path))


def paused(sweep: SweepDir, point: int, value: float, rung: int = 1) -> None:
    """The run of this point has come to a rung, and left there."""
    run = sweep.runs()[point]
    write_rung(sweep.path, Reached(run.run_id, rung, 100 * rung, value), f"41_{point}.0")
    journal = Journal(run.journal, f"41_{point}.0")
    journal.append("attempt_started", job_id=f"41_{point}", restart=0)
    journal.append("rung", rung=rung, step=100 * rung, value=value, goes_on=False)
    journal.append("attempt_ended", cause="paused")
    journal.append("rested", state="STOPPED", reason="paused at rung 1 (step 100)", rung=rung)


def test_a_paused_run_is_submitted_again_once_it_is_one_of_the_best(make: Callable[..., SweepDir], queue: Queue) -> None:
    sweep = make(7, halving={"first_rung": 100, "eta": 3, "metric": "loss", "mode": "min"})
    advance(sweep)
    for point, value in ((0, 2.0), (1, 3.0)):
        paused(sweep, point, value)
        queue.end(f"41_{point}")
    assert advance(sweep) == [], "two are too few to tell who is good"
    (sweep.path / NAME).write_text('{"event": "reached", "torn')  # their own journals know
    paused(sweep, 2, 9.0)
    queue.end("41_2")
    best = sweep.runs()[0]
    assert advance(sweep) == [
        f"run {best.run_id} goes on after rung 1 (step 100): the best of 3 by now",
        "sweep one: 1 of its points submitted as job 42",
    ]
    life = read_record(best).life
    assert (life.job_id, life.ended, life.paused_at) == ("42", None, None)
    assert passed_rungs(read_journal(best.journal)) == {1}
    assert advance(sweep) == [], "once"
    for point in (3, 4, 5, 6):
        finish(sweep.runs()[point], "FAILED", "crashed")
        queue.end(f"41_{point}")
    assert advance(sweep) == [], "it is still to come to the next rung; of three at this one the best goes on"
    finish(best, "FAILED", "crashed")
    queue.end("42")
    (again, _) = advance(sweep)
    assert again.startswith(f"run {sweep.runs()[1].run_id} goes on after rung 1"), "the place is the next one's"


def test_neither_a_stopped_sweep_nor_a_cancelled_run_is_gone_on_with(make: Callable[..., SweepDir], queue: Queue) -> None:
    sweep = three_at_a_rung(make, queue)
    sweep.journal("cancelled", by="me")
    assert advance(sweep) == []
    Journal(sweep.runs()[0].journal).append("cancel_requested")
    sweep.journal("resumed", by="me", points=[])
    (said, _) = advance(sweep)
    assert said.startswith(f"run {sweep.runs()[1].run_id} goes on")


def test_an_array_is_released_though_slurm_says_no_for_elements_that_have_ended(
    make: Callable[..., SweepDir], queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*words: object) -> None:
        queue.scontrol.append(("refused", str(words[0]), None))
        raise SlurmRejected("Job/step already completing or completed", "")

    sweep = make(2, 2, throttle=4)
    advance(sweep)
    for name in ("hold", "limit_array"):
        monkeypatch.setattr(client, name, refuse)
    sweep.journal("share", job_id="41", to=0)
    advance(sweep)
    assert ("release", "41", None) in queue.scontrol
    assert life_of(sweep).shares["41"] == 2


def test_failures_from_before_a_resume_do_not_stop_the_sweep_again(make: Callable[..., SweepDir], queue: Queue) -> None:
    sweep = make(3, max_failures=0, on_max_failures="drain")
    advance(sweep)
    first, second, _ = sweep.runs()
    finish(first, "FAILED", "crashed")
    advance(sweep)
    assert len(lines(sweep, "stopped")) == 1
    sweep.journal("resumed", points=[1, 2])
    advance(sweep)
    assert len(lines(sweep, "stopped")) == 1
    finish(second, "FAILED", "crashed")
    advance(sweep)
    assert len(lines(sweep, "stopped")) == 2


def test_a_stop_reaches_runs_that_have_come_back_in_jobs_of_their_own(make: Callable[..., SweepDir], queue: Queue) -> None:
    sweep = make(2, max_failures=0, on_max_failures="stop")
    advance(sweep)
    failed, back = sweep.runs()
    Journal(back.journal).append("submitted", job_id="99", how="supervisor")
    back.attempts.mkdir()
    queue.jobs = {"99": MyJob("99", "RUNNING", comment=f"hpcmoe:{back.run_id}-1")}
    finish(failed, "FAILED", "crashed")
    advance(sweep)
    assert (back.control / "stop").exists()


def test_points_survive_a_torn_line_before_them(make: Callable[..., SweepDir], queue: Queue) -> None:
    sweep = make(1)
    with sweep.points_file.open("a") as file:
        file.write('{"index": 1, "overr')
    sweep.append_points([SweepPoint(2, ("x=2",), "k2", "abcdef")])
    assert [point.index for point in sweep.read_points()] == [0, 2]


def three_at_a_rung(make: Callable[..., SweepDir], queue: Queue) -> SweepDir:
    sweep = make(3, halving={"first_rung": 100, "eta": 3, "metric": "loss", "mode": "min"})
    advance(sweep)
    for point in range(3):
        paused(sweep, point, float(point))
        queue.end(f"41_{point}")
    return sweep


def test_supervise_goes_on_with_a_sweep_whose_runs_have_all_paused(make: Callable[..., SweepDir], queue: Queue) -> None:
    sweep = three_at_a_rung(make, queue)
    deeds = one_round(sweep.root, Glancer(sweep.root)).deeds
    assert [deed["did"] for deed in deeds] == ["advanced", "advanced"]
    assert read_record(sweep.runs()[0]).job_id == "42"


def test_a_run_whose_directory_was_deleted_is_not_waited_for_at_a_rung(make: Callable[..., SweepDir], queue: Queue) -> None:
    sweep = make(2, halving={"first_rung": 100, "eta": 3, "metric": "loss", "mode": "min"})
    advance(sweep)
    paused(sweep, 0, 1.0)
    queue.end("41_0")
    assert advance(sweep) == [], "another is to come"
    shutil.rmtree(sweep.runs()[1].path)
    queue.end("41_1")
    assert advance(sweep)[0].startswith(f"run {sweep.runs()[0].run_id} goes on after rung 1")
