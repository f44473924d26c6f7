"""Which node is to blame: cases as they stand in srun's words, in tracebacks and in the watchdog's report."""

from __future__ import annotations

from typing import Any

import pytest

from hpcmoe.runs.nodes import STRAGGLER, Blame, Evidence, blamed, excluded, without

HOSTS = ("n0001", "n0002", "n0003")
PEER_GONE = (
    "Traceback (most recent call last):\n  ...\nRuntimeError: [gloo/.../pair.cc:534] Connection closed by peer [10.0.0.2]:1"
)
OWN_ERROR = "Traceback (most recent call last):\n  ...\nFileNotFoundError: [Errno 2] No such file or directory: '/scratch/text'"
NCCL_PEER = "torch.distributed.DistBackendError: NCCL error ... ncclRemoteError: A call failed possibly due to a network error"
# as srun 22.05 says it when one of four tasks is killed and it ends the others
KILLED = """\
srun: error: n0002: task 2: Killed
srun: launch/slurm: _step_signal: Terminating StepId=3.0
srun: error: n0002: task 3: Terminated
srun: error: n0001: tasks 0-1: Killed
srun: Force Terminated StepId=3.0
"""


# nothing to start: on two nodes at once, one of them after srun had begun to end the others
NO_PYTHON = """\
srun: error: n0002: tasks 2-3: Exited with exit code 127
srun: launch/slurm: _step_signal: Terminating StepId=1.3
srun: error: n0001: tasks 0-1: Exited with exit code 127
srun: error: n0003: tasks 4-5: Terminated
"""
ABORTED = """\
srun: error: n0002: task 2: Aborted (core dumped)
srun: launch/slurm: _step_signal: Terminating StepId=1.3
srun: error: n0001: task 0: Aborted (core dumped)
srun: error: n0003: tasks 4-5: Killed
"""


def evidence(**facts: Any) -> Evidence:
    values: dict[str, Any] = {"hosts": HOSTS, "ranks_per_node": 2}
    return Evidence(**(values | facts))


def nodes(**facts: Any) -> list[tuple[str, str, bool]]:
    return [(blame.node, blame.why, blame.sure) for blame in blamed(evidence(**facts))]


def test_the_node_that_slurm_calls_down_is_to_blame_whatever_the_ranks_say() -> None:
    found = blamed(evidence(down={"n0003": "down*: Not responding"}, srun=KILLED, errors={0: OWN_ERROR}))
    assert found == [Blame("n0003", "node_failure", "down*: Not responding", sure=True)]


def test_srun_names_a_failed_node() -> None:
    assert nodes(srun="srun: error: Node failure on n0002\nsrun: error: n0001: task 0: Killed\n") == [
        ("n0002", "node_failure", True)
    ]


def test_the_first_task_that_was_killed_counts_and_not_those_that_srun_ended() -> None:
    (found,) = blamed(evidence(srun=KILLED, errors={0: PEER_GONE, 1: PEER_GONE, 4: NCCL_PEER}))
    assert found == Blame("n0002", "crash", "rank 2: Killed", sure=False)


@pytest.mark.parametrize("how", ["Segmentation fault (core dumped)", "Bus error", "Out Of Memory"])
def test_any_other_signal_is_like_a_kill(how: str) -> None:
    assert nodes(srun=f"srun: error: n0001: tasks 0-1: {how}\n") == [("n0001", "crash", False)]


def test_a_rank_that_left_without_a_traceback_is_the_origin() -> None:
    line = "srun: error: n0003: tasks 4-5: Exited with exit code 127\n"
    (found,) = blamed(evidence(srun=line, errors={0: PEER_GONE}))
    assert found == Blame("n0003", "crash", "rank 4: Exited with exit code 127", sure=False)


def test_a_node_that_cannot_start_tasks_is_to_blame() -> None:
    line = "srun: error: Task launch for StepId=7.0 failed on node n0003: Invalid job credential\n"
    assert nodes(srun=line) == [("n0003", "crash", False)]


def test_the_rank_with_an_error_of_its_own_is_told_from_those_that_lost_a_peer() -> None:
    (found,) = blamed(evidence(errors={0: PEER_GONE, 2: OWN_ERROR, 3: OWN_ERROR, 4: NCCL_PEER}))
    assert (found.node, found.sure) == ("n0002", False)
    assert found.evidence.startswith("rank 2: FileNotFoundError")


@pytest.mark.parametrize(
    "facts",
    [
        {"errors": {0: OWN_ERROR, 2: OWN_ERROR}},  # the program's, on two nodes at once
        {"errors": {0: PEER_GONE, 2: NCCL_PEER}},  # all lost a peer, nobody knows whom
        {"srun": "srun: error: n0002: task 2: Exited with exit code 1\n", "errors": {2: PEER_GONE, 0: PEER_GONE}},
        {"srun": NO_PYTHON},
        {"srun": ABORTED},
        {"srun": "srun: error: n0002: task 2: Aborted (core dumped)\n", "errors": {2: NCCL_PEER}},
        {"srun": "srun: error: n0009: task 2: Killed\n"},  # of another job
        {},
    ],
)
def test_where_no_single_node_is_the_origin_none_is_named(facts: dict[str, Any]) -> None:
    assert nodes(**facts) == []


def test_a_lone_node_is_suspected_only_before_the_first_step() -> None:
    alone: dict[str, Any] = {"hosts": ("n0001",), "errors": {0: OWN_ERROR}}
    assert nodes(**alone) == [("n0001", "crash", False)]
    assert nodes(**alone, made_a_step=True) == []


def test_silent_ranks_of_one_node_convict_it_and_ranks_that_are_behind_raise_a_suspicion() -> None:
    silent = {"rank": 3, "silent": True}
    behind = {"rank": 2, "silent": False}
    assert nodes(behind=[behind, silent]) == [("n0002", "hang", True)]
    assert nodes(behind=[behind]) == [("n0002", "hang", False)]
    assert nodes(behind=[silent, {"rank": 4, "silent": True}]) == []
    assert nodes(behind=[silent | {"rank": 0}], hosts=("n0001",)) == []


def event(t: float, node: str, sure: bool = False, evidence: str = "rank 2: Killed") -> dict[str, Any]:
    return {"t": t, "event": "node_blamed", "node": node, "why": "crash", "evidence": evidence, "sure": sure}


def test_one_sure_blame_or_two_strikes_exclude_a_node_for_its_time() -> None:
    events = [event(0.0, "n0001", evidence="a"), event(10.0, "n0002", sure=True), event(20.0, "n0001", evidence="b")]
    assert excluded(events, 30.0, 100.0, 2) == {"n0001": 120.0, "n0002": 110.0}
    assert excluded(events[:2], 30.0, 100.0, 2) == {"n0002": 110.0}
    assert excluded(events, 30.0, 100.0, 3) == {"n0002": 110.0}


def test_exclusion_ends_by_itself_and_strikes_are_forgotten() -> None:
    events = [event(0.0, "n0001", sure=True), event(0.0, "n0002"), event(90.0, "n0002")]
    assert excluded(events, 99.0, 100.0, 2) == {"n0001": 100.0, "n0002": 190.0}
    assert excluded(events, 100.0, 100.0, 2) == {}
    assert excluded(events, 1.0, 0.0, 2) == {}, "exclude_for_s=0"


def test_a_crash_that_says_the_same_on_another_node_is_the_program_s_own() -> None:
    events = [event(0.0, "n0001"), event(1.0, "n0001"), event(2.0, "n0002", evidence="rank 5: Killed")]
    assert excluded(events[:2], 3.0, 100.0, 2) == {"n0001": 101.0}
    assert excluded(events, 3.0, 100.0, 2) == {}
    assert excluded([*events, event(2.5, "n0001", sure=True)], 3.0, 100.0, 2) == {"n0001": 102.5}, "a sure blame stands"


def test_nodes_that_the_user_names_stay_and_enough_nodes_are_left() -> None:
    until = {"n0001": 1.0, "n0002": 3.0, "n0003": 2.0}
    assert without(until, [], None) == ["n0001", "n0002", "n0003"]
    assert without(until, ["n0002"], None) == ["n0001", "n0003"]
    assert without(until, [], 2) == ["n0002", "n0003"]
    assert without(until, [], -1) == []


def slow(t: float, node: str, rank: int = 3, attempt: str = "7.0") -> dict[str, Any]:
    return {"t": t, "event": STRAGGLER, "attempt": attempt, "node": node, "rank": rank, "times": 1.8}


def test_a_straggler_s_node_is_left_out_where_that_was_asked_for_and_for_as_long_as_any_other() -> None:
    assert excluded([slow(1.0, "n0002")], 9.0, 100.0, 2, "exclude") == {"n0002": 101.0}
    assert excluded([slow(1.0, "n0002")], 101.0, 100.0, 2, "exclude") == {}
    assert excluded([slow(1.0, "n0002")], 9.0, 100.0, 2) == {}


def test_a_straggler_is_a_strike_beside_a_crash_and_never_alone() -> None:
    again = [slow(1.0, "n0002"), slow(1.0, "n0002", rank=2), slow(2.0, "n0002", attempt="7.1"), slow(3.0, "n0002", attempt="7.2")]
    assert excluded(again, 9.0, 100.0, 2) == {}
    assert excluded([again[0], event(4.0, "n0002")], 9.0, 100.0, 2) == {"n0002": 104.0}
    assert excluded([*again[:2], event(4.0, "n0002")], 9.0, 100.0, 3) == {}, "two ranks in one attempt are one strike"


def test_a_rank_that_is_slow_wherever_it_runs_has_more_to_do() -> None:
    wandering = [slow(1.0, "n0002"), slow(2.0, "n0003", attempt="7.1")]
    assert excluded(wandering, 9.0, 100.0, 2, "exclude") == {}
    assert excluded([wandering[0], slow(2.0, "n0003", rank=5)], 9.0, 100.0, 2, "exclude") == {"n0002": 101.0, "n0003": 102.0}
