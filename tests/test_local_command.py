"""``engine=command`` on a machine without Slurm: a shell script that counts lives as a run of hpcmoe's own engine does."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcmoe.runs.journal import iter_json_lines
from tests.test_local_run import Desk, count, until

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

LAST = 24
# Counts from where its checkpoint says, and saves when it is told to leave.
COUNTER = f"""
at=$(cat checkpoint 2>/dev/null || echo 0)
trap 'echo $at >checkpoint; exit 0' TERM
[[ $HPCMOE_FIRST_START == 1 ]] || echo "start $HPCMOE_RESTARTS continues after $at"
while ((at < {LAST})); do
  [[ -e fail && $at -ge $(cat fail) ]] && {{ rm fail; echo "no luck at $at"; exit 3; }}
  at=$((at + 1)); echo "step: $at loss: 2.5"
  sleep 0.1 & wait $!
done
"""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    desk = Desk(tmp_path_factory.mktemp("a desk"))
    (desk.folder / "train.sh").write_text(COUNTER, encoding="utf-8")
    return desk


RUN = ["cluster=local", "gpus_per_node=1", "engine=command", "engine.command=[bash,train.sh]"]
STEPS = r"engine.progress='step: (?P<step>\d+) loss: (?P<loss>\S+)'"


def last_step(run: Path) -> int:
    return max((line["step"] for line in iter_json_lines(run / "metrics.jsonl")), default=0)


def test_a_shell_script_crashes_comes_back_is_stopped_and_resumed_to_its_end(desk: Desk) -> None:
    (desk.folder / "fail").write_text("3")
    run = Path(desk.json("submit", *RUN, STEPS)["run_dir"])
    until("the crash's end", lambda: count(run, "attempt_started") == 2 and last_step(run) > 4)
    (run / "control" / "stop").touch()
    assert desk.json("wait", run.name, rc=4)["state"] == "STOPPED"
    saved = int((desk.folder / "checkpoint").read_text())
    assert 0 < saved < LAST

    desk.hpcmoe("resume", run.name)
    status = desk.json("wait", run.name)
    crashed, stopped, last = status["attempts"]
    assert (status["state"], crashed["cause"], stopped["cause"], last["cause"]) == (
        "COMPLETED",
        "crashed",
        "stopped",
        "completed",
    )
    assert crashed["detail"] == "rank0000: the command left with exit code 3: no luck at 3"
    assert (last["first_step"], last["last_step"], status["step"]) == (saved + 1, LAST, LAST)
    assert [attempt["steps_lost"] for attempt in status["attempts"]] == [None] * 3
    assert f"start 2 continues after {saved}" in desk.hpcmoe("logs", run.name).stdout
    story = desk.hpcmoe("status", run.name).stdout
    for words in (f"step {LAST}: loss 2.5", "unknown steps lost"):
        assert words in story
    assert "not certified" in desk.hpcmoe("status", run.name, "--certify", rc=2).stderr


def test_where_nobody_can_see_its_steps_they_are_unknown_and_cancel_still_lets_it_save(desk: Desk) -> None:
    (desk.folder / "checkpoint").unlink(missing_ok=True)
    run = Path(desk.json("submit", *RUN)["run_dir"])
    until("a step", lambda: any("step: 2" in log.read_text() for log in run.glob("attempts/*/rank-0000.log")))
    assert desk.json("cancel", run.name)["state"] == "CANCELLED"
    assert int((desk.folder / "checkpoint").read_text()) >= 2
    assert desk.json("status", run.name)["step"] is None
    row = next(line for line in desk.hpcmoe("status").stdout.splitlines() if line.startswith(run.name))
    assert row.split()[1:4] == ["command", "CANCELLED", "-"]


def test_a_sweep_gives_each_command_its_own_words(desk: Desk) -> None:
    words = ["engine.command=[bash,train.sh,'${user.lr}']", "+user.lr=1e-4,3e-4"]
    told = desk.json("submit", "-m", *RUN[:3], *words, "--dry-run")
    assert [point["config"]["engine"]["command"][2] for point in told["points"]] == ["0.0001", "0.0003"]
    assert ["hpcmoe.engine.command" in script for script in told["scripts"].values()] == [True]
    assert "train" not in told["points"][0]["config"]
