"""Whatever takes the machine away, the run comes back and ends with the losses of a run that nobody touched, bit for bit.

On a real Slurm, over two nodes or four. Several things happen to one run in a test, since each return costs a start of all
ranks. Each test is one person's night, root's or an ordinary user's; HPCMOE_ALL_NIGHTS=1 gives every night to both, and four
ranks to every node.
"""

from __future__ import annotations

import itertools
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpcmoe.runs.journal import iter_json_lines
from hpcmoe.runs.rundir import RunDir
from tests.engine.ranks import Attempt
from tests.slurm.night import ALL_NIGHTS, EXAMPLE, STEPS, STOP_LEAD_S, Night, begin
from tests.slurm.testbed_client import Testbed

pytestmark = pytest.mark.timeout(3000)

PARTS = ("launch", "imports", "rendezvous", "corpus", "build", "load", "peak", "first_step")
Losses = dict[int, float]


@pytest.fixture(scope="session")
def untouched(testbed: Testbed) -> Losses:
    """The losses of a run to which nothing happens."""
    night = begin(testbed, testbed.shared_folder("untouched"), None, "slurm.partition=high")
    night.until_state("COMPLETED", "FAILED", "STOPPED")
    losses = night.losses()
    assert sorted(losses) == list(range(1, STEPS + 1)), night.postmortem()
    return {step: values.pop() for step, values in losses.items()}


def nights(*people: str) -> pytest.MarkDecorator:
    """Whose nights these are."""
    return pytest.mark.parametrize("user", ["root", "ordinary"] if ALL_NIGHTS else list(people), indirect=True)


@pytest.fixture
def user(request: pytest.FixtureRequest) -> str | None:
    """Who submits: an ordinary user's name, or None for root."""
    return None if request.param == "root" else str(request.getfixturevalue("ordinary_user"))


@pytest.fixture
def runs(testbed: Testbed, request: pytest.FixtureRequest) -> Path:
    return testbed.shared_folder(request.node.name)


def assert_as_untouched(night: Night, untouched: Losses) -> None:
    """Every step was made, and each time it was made it had the loss that it has when nothing happens."""
    differing = {step: values for step, values in night.losses().items() if values != {untouched[step]}}
    assert not differing, night.postmortem()
    assert sorted(night.losses()) == sorted(untouched), night.postmortem()


def assert_story(night: Night, causes: list[str], lost: list[int | None] | None = None) -> None:
    """`status` tells the attempts, why each ended, and what it cost."""
    status = night.status()
    attempts = status["attempts"]
    assert status["state"] == "COMPLETED", night.postmortem()
    assert [attempt["cause"] for attempt in attempts] == causes, night.postmortem()
    for attempt, allowed in zip(attempts, lost or [0] * len(causes), strict=True):
        assert allowed is None or attempt["steps_lost"] == allowed, night.postmortem()
    for attempt in attempts:
        assert attempt["first_step"] is None or tuple(attempt["startup"]) == PARTS, night.postmortem()
    for earlier, later in itertools.pairwise(attempts):
        assert later["first_step"] == earlier["last_step"] + 1 - earlier["steps_lost"], night.postmortem()
    assert status["gpu_hours"] == pytest.approx(sum(attempt["gpu_hours"] for attempt in attempts))
    assert all(attempt["gpu_hours"] > 0 for attempt in attempts)


def preempted_with_and_without_user_signal(night: Night) -> None:
    night.until("the start", lambda: night.started_attempts() == 1)
    night.testbed.set_user_signal(False)
    night.preempt()
    night.testbed.set_user_signal(True)
    night.preempt()
    night.testbed.set_user_signal(False)


@nights("ordinary")
def test_preempted_with_grace_and_requeued_by_an_administrator(
    testbed: Testbed, runs: Path, user: str | None, untouched: Losses
) -> None:
    night = begin(testbed, runs, user, "slurm.partition=requeue_grace")
    preempted_with_and_without_user_signal(night)
    night.admin_requeue()
    night.until_state("COMPLETED", "FAILED")
    assert_as_untouched(night, untouched)
    assert_story(night, ["preempted", "preempted", "requeued", "completed"])


@nights("root")
def test_preempted_where_slurm_cancels_and_a_rank_killed_without_warning(
    testbed: Testbed, runs: Path, user: str | None, untouched: Losses
) -> None:
    night = begin(testbed, runs, user, "slurm.partition=cancel_grace")
    preempted_with_and_without_user_signal(night)
    night.kill_rank(1)
    night.until_state("COMPLETED", "FAILED")
    assert_as_untouched(night, untouched)
    assert_story(night, ["preempted", "preempted", "crashed", "completed"], lost=[0, 0, None, 0])
    lost = night.status()["attempts"][2]["steps_lost"]
    assert lost <= 20  # checkpoint.interval
    certificates = json.loads(night.hpcmoe("status", night.run_id, "--certify", "--json").stdout)["certificates"]
    redone = "identical" if lost else "not_comparable"
    assert [one["verdict"] for one in certificates] == ["not_comparable", "not_comparable", redone], night.postmortem()
    assert all(event["end_time"] > event["t"] for event in night.events("attempt_started"))


@nights("ordinary")
def test_preempted_without_grace_and_told_to_stop_by_a_colleague(
    testbed: Testbed, runs: Path, user: str | None, untouched: Losses
) -> None:
    night = begin(testbed, runs, user, "slurm.partition=requeue_nograce")
    preempted_with_and_without_user_signal(night)
    night.stop_by_file()
    assert night.until_state("STOPPED", "COMPLETED", "FAILED")["state"] == "STOPPED"
    night.hpcmoe("resume", night.run_id[:4])
    night.until_state("COMPLETED", "FAILED")
    assert_as_untouched(night, untouched)
    assert_story(night, ["preempted", "preempted", "stopped", "completed"])


@nights("root")
def test_cut_by_its_time_limit_twice(testbed: Testbed, runs: Path, user: str | None, untouched: Losses) -> None:
    night = begin(testbed, runs, user, "slurm.time=30", f"resilience.stop_lead_s={STOP_LEAD_S}")
    night.until("the start", lambda: night.started_attempts() == 1)
    night.outlast_time_limit()
    night.outlast_time_limit()
    night.until_state("COMPLETED", "FAILED")
    assert_as_untouched(night, untouched)
    assert_story(night, ["time_limit", "time_limit", "completed"])


@nights("root")
def test_tensor_pipeline_expert_and_sharded_parallel_over_four_nodes_is_preempted(
    testbed: Testbed, runs: Path, user: str | None, tmp_path: Path
) -> None:
    night = begin(testbed, runs, user, "slurm.partition=requeue_grace", run=EXAMPLE, steps=4)
    night.until("the start", lambda: night.started_attempts() == 1)
    night.preempt()
    night.until_state("COMPLETED", "FAILED")
    # the untouched run: the same config on ranks of this machine, which need not import PyTorch sixteen times
    (tmp_path / "control").mkdir()
    shutil.copy(night.dir / "config.yaml", tmp_path)
    alone = Attempt(RunDir(tmp_path), "untouched.0", 16, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"})
    assert alone.finish() == [0] * 16, alone.log()
    assert_as_untouched(night, {line["step"]: line["loss"] for line in iter_json_lines(tmp_path / "metrics.jsonl")})
    assert_story(night, ["preempted", "completed"])
    assert night.status()["step"] == 4


@nights("ordinary")
def test_where_requeue_is_refused_a_successor_goes_on_which_is_cancelled_within_the_grace_time_and_for_good(
    testbed: Testbed, runs: Path, user: str | None
) -> None:
    night = begin(testbed, runs, user, "slurm.requeue=false", steps=1_000_000)
    night.until_step(3)
    testbed.run(["scancel", "--signal=USR2", night.job_id], user, check=True)
    night.until_return(1)
    assert night.events("requeue_refused")

    successor = night.events("attempt_started")[-1]["job_id"]
    assert successor != night.job_id
    testbed.run(["scontrol", "update", f"JobId={successor}", "Requeue=1"], user, check=True)  # so that it could come back
    night.until_step(night.step() + 3)
    night.hpcmoe("cancel", night.run_id)
    assert_cancelled_for_good(night, successor)

    again = json.loads(night.hpcmoe("resume", night.run_id, "--json").stdout)["job_id"]
    night.until_step(night.step() + 3)
    testbed.run(["scontrol", "update", f"JobId={again}", "Requeue=1"], user, check=True)
    testbed.run(["scancel", again], user, check=True)
    assert_cancelled_for_good(night, again)

    attempts = night.status()["attempts"]
    told = [(attempt["job_id"], attempt["cause"], attempt["steps_lost"]) for attempt in attempts]
    causes = [(night.job_id, "signalled", 0), (successor, "cancelled", 0), (again, "cancelled", 0)]
    assert told == causes, night.postmortem()
    # the job script told its own end: Slurm kills one that is not gone within the grace time
    assert all(event["rc"] is not None for event in night.events("attempt_ended")), night.postmortem()


def assert_cancelled_for_good(night: Night, job_id: str) -> None:
    night.until_state("CANCELLED")
    night.testbed.wait_for(job_id, {"CANCELLED"})
    facts = night.testbed.show(job_id)
    assert facts["Restarts"] == "0"
    queue = ["squeue", "-h", "-o%i", "--states=PENDING,RUNNING", f"--name={facts['JobName']}"]
    assert night.testbed.run(queue, check=True).stdout == "", "a successor"


@nights("ordinary")
def test_where_neither_requeue_nor_a_successor_is_to_be_had_those_who_look_after_the_run_submit_it_once(
    testbed: Testbed, runs: Path, user: str | None
) -> None:
    night = begin(testbed, runs, user, "slurm.requeue=false", "resilience.successor=false")
    night.until("the start", lambda: night.started_attempts() == 1)
    testbed.run(["scancel", "--batch", "--signal=USR2", night.job_id], user, check=True)
    night.until("the end", lambda: bool(night.events("stranded")))
    testbed.wait_for(night.job_id, {"FAILED"})
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(night.hpcmoe, "wait", night.run_id, "-q", check=False)
        rounds = list(pool.map(lambda _: night.hpcmoe("supervise", "--once", "--json"), range(2)))
        night.until_return(1)
        night.hpcmoe("cancel", night.run_id)
        assert waiting.result().returncode == 3, "CANCELLED"
    again = [event for event in night.events("submitted") if event["how"] == "supervisor"]
    assert [event["job_id"] for event in again] == [night.events("attempt_started")[-1]["job_id"]], night.postmortem()
    name = testbed.show(night.job_id)["JobName"]
    assert len(testbed.run(["squeue", "-h", "-o%i", "--states=all", f"--name={name}"], check=True).stdout.split()) == 2
    assert {deed["job_id"] for done in rounds for deed in json.loads(done.stdout)["deeds"]} <= {again[0]["job_id"]}


@nights("root")
def test_an_elastic_run_starts_on_the_one_free_node_and_goes_on_on_three(testbed: Testbed, runs: Path, user: str | None) -> None:
    batch = 64 * 12  # tokens; one, two and three nodes divide it
    busy = testbed.sbatch("#!/bin/sh\nsleep 600\n", "-phigh", "-N3", "--exclusive", "-t9", "-o/dev/null")
    testbed.wait_for(busy, {"RUNNING"})
    elastic = [
        "nodes=1..3",
        "gpus_per_node=1",
        "layout.ep=1",
        f"train.global_batch_tokens={batch}",
        "slurm.partition=requeue_grace",
    ]
    night = begin(testbed, runs, user, *elastic, steps=1_000_000)
    night.until_step(2)
    testbed.run(["scancel", busy], check=True)
    testbed.wait_for(busy, {"CANCELLED"})
    night.admin_requeue()
    night.until("a step on three nodes", lambda: len(night.events("first_step")) == 2)
    night.stop_by_file()
    night.until_state("STOPPED")
    assert [event["nodes"] for event in night.events("laid_out")] == [1, 3], night.postmortem()
    attempts = night.status()["attempts"]
    told = [(attempt["nodes"], len(attempt["hosts"]), attempt["cause"], attempt["steps_lost"]) for attempt in attempts]
    assert told == [(1, 1, "requeued", 0), (3, 3, "stopped", 0)], night.postmortem()
    assert [line["tokens"] for line in night.metrics()] == [batch * step for step in range(1, night.step() + 1)], (
        night.postmortem()
    )
