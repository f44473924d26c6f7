"""The local job script, executed: quoting, signals, failing ranks, coming back. Python is played by a stand-in."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcmoe.runs.jobspec import JobSpec, render
from tests.launchers.stage import NASTY, PATIENCE_S, Stage, config


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def script(stage: Stage, *overrides: str, ranks: int = 2, **fields: object) -> str:
    cfg = config("cluster=local", f"gpus_per_node={ranks}", *overrides)
    return render(JobSpec((stage.run_dir,), cfg, str(stage.python), "name", "token", **fields))  # type: ignore[arg-type]


def until(true: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def test_every_rank_gets_its_place_in_the_world(stage: Stage) -> None:
    stage.play(rank='say "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $HPCMOE_ATTEMPT" ')
    assert stage.run(script(stage, ranks=3)) == 0
    attempt = stage.calls[0].removeprefix("arrive ")
    assert attempt.startswith("local-")
    assert sorted(stage.calls[1:-1]) == [f"{r} {r} 3 3 127.0.0.1:23456 {attempt}" for r in range(3)]
    assert stage.calls[-1] == "depart --rc 0 --heard "


def test_nasty_values_arrive_unchanged(stage: Stage) -> None:
    nasty = NASTY + "\nsecond line"
    text = render(
        JobSpec((stage.run_dir,), _with_env(nasty), str(stage.python), "name", "token"),
    )
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False).stderr == ""
    stage.play(rank='printf %s "$TRICKY" >"$HPCMOE_RUN_DIR/value-$RANK"')
    assert stage.run(text) == 0
    assert (stage.run_dir / "value-0").read_text(encoding="utf-8") == nasty


def _with_env(value: str):  # type: ignore[no-untyped-def]
    cfg = config("cluster=local", "gpus_per_node=1")
    cfg.env = {"TRICKY": value}
    return cfg


def test_each_rank_has_a_log_that_grows(stage: Stage) -> None:
    stage.play(rank='echo "out of $RANK"; echo "err of $RANK" >&2')
    stage.run(script(stage))
    attempt = stage.calls[0].removeprefix("arrive ")
    for rank in range(2):
        log = stage.run_dir / "attempts" / attempt / f"rank-{rank:04d}.log"
        assert log.read_text(encoding="utf-8") == f"out of {rank}\nerr of {rank}\n"


@pytest.mark.parametrize("name", ["USR1", "TERM", "INT"])
def test_a_signal_reaches_the_ranks_as_usr2_and_is_told_to_depart(stage: Stage, name: str) -> None:
    stage.play(rank="trap 'say got; exit 0' USR2; trap : TERM; say ready; while :; do sleep 0.1; done")
    # the script ignores USR2 on the ranks' behalf until they listen, and bash cannot unignore: listen through Python
    stage.play(rank=f'exec python3 -c "{LISTENER}"')
    process = stage.start(script(stage))
    until(lambda: stage.calls.count("ready") == 2)
    os.kill(process.pid, getattr(signal, f"SIG{name}"))
    assert process.wait(timeout=PATIENCE_S) == 0
    assert stage.calls.count("got USR2") == 2
    assert stage.calls[-1] == f"depart --rc 0 --heard {name}"
    assert list(stage.run_dir.glob("attempts/*/notice")), "a rank that starts late must find the notice"


LISTENER = """
import os, signal, sys, time
calls = open(os.environ['HPCMOE_RUN_DIR'] + '/calls', 'a', buffering=1)
def leave(number, frame):
    calls.write('got ' + signal.Signals(number).name[3:] + chr(10))
    sys.exit(int(os.environ.get('LEAVE_WITH', 0)))
for name in ('SIGUSR2', 'SIGTERM'):
    signal.signal(getattr(signal, name), leave)
calls.write('ready' + chr(10))
while True:
    time.sleep(0.05)
""".strip()


AWAIT_NOTICE = "until [[ -e $HPCMOE_RUN_DIR/attempts/$HPCMOE_ATTEMPT/notice ]]; do sleep 0.1; done"


def test_a_signal_before_any_rank_listens_kills_nobody(stage: Stage) -> None:
    stage.play(rank=f"say started; {AWAIT_NOTICE}; sleep 0.5; say saw the notice")  # the signal follows the notice
    process = stage.start(script(stage))
    until(lambda: stage.calls.count("started") == 2)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=PATIENCE_S) == 0
    assert stage.calls.count("saw the notice") == 2
    assert stage.calls[-1] == "depart --rc 0 --heard TERM"


def test_a_signal_during_arrive_means_that_no_rank_starts(stage: Stage) -> None:
    stage.play(arrive=AWAIT_NOTICE, rank="say started")
    process = stage.start(script(stage))
    until(lambda: any(call.startswith("arrive") for call in stage.calls))
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=PATIENCE_S) == 0
    assert stage.calls[1:] == ["depart --rc 0 --heard TERM"]


def test_a_failing_rank_takes_the_others_along(stage: Stage) -> None:
    fail_late = 'until grep -q ready "$HPCMOE_RUN_DIR/calls"; do sleep 0.1; done; exit 7'
    stage.play(rank=f'[[ $RANK == 1 ]] && {{ {fail_late}; }}; exec python3 -c "{LISTENER}"')
    stage.run(script(stage, "resilience.kill_wait_s=600"))
    assert stage.calls[-3:] == ["ready", "got TERM", "depart --rc 7 --heard "]


def test_a_rank_that_does_not_leave_is_killed(stage: Stage) -> None:
    stage.play(rank="[[ $RANK == 1 ]] && exit 7; trap '' TERM; exec sleep 600")
    stage.run(script(stage, "resilience.kill_wait_s=1"))
    assert stage.calls[-1] == "depart --rc 7 --heard "


def test_a_rank_killed_from_outside_counts_as_a_failure(stage: Stage) -> None:
    stage.play(rank="[[ $RANK == 1 ]] && kill -KILL $BASHPID; exec sleep 60")
    stage.run(script(stage))
    assert stage.calls[-1] == "depart --rc 137 --heard "


def test_depart_can_ask_for_another_start_and_its_exit_code_is_the_scripts(stage: Stage) -> None:
    stage.play(depart="[[ $HPCMOE_ATTEMPT == *.2 ]] && exit 3; exit 85")
    assert stage.run(script(stage)) == 3
    attempts = [call.removeprefix("arrive ").partition(".")[2] for call in stage.calls if call.startswith("arrive")]
    assert attempts == ["0", "1", "2"]


@pytest.mark.parametrize(("said", "code"), [(3, 0), (2, 2), (1, 1)])
def test_no_rank_starts_when_arrive_says_no(stage: Stage, said: int, code: int) -> None:
    stage.play(arrive=f"exit {said}")
    assert stage.run(script(stage)) == code
    assert len(stage.calls) == 1


def test_signals_do_not_disturb_depart(stage: Stage) -> None:
    stage.play(depart="say begun; until [[ -e $HPCMOE_RUN_DIR/go ]]; do sleep 0.1; done; say done; exit 4")
    process = stage.start(script(stage))
    until(lambda: "begun" in stage.calls)
    for _ in range(3):
        os.killpg(process.pid, signal.SIGTERM)
        time.sleep(0.1)
    (stage.run_dir / "go").touch()
    assert process.wait(timeout=PATIENCE_S) == 4
    assert stage.calls[-1] == "done"


def test_ranks_do_not_outlive_a_killed_script(stage: Stage) -> None:
    stage.play(rank='say "pid $BASHPID"; exec sleep 60')
    process = stage.start(script(stage))
    until(lambda: sum(call.startswith("pid") for call in stage.calls) == 2)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=PATIENCE_S)
    pids = [int(call.removeprefix("pid ")) for call in stage.calls if call.startswith("pid")]
    until(lambda: not any(_alive(pid) for pid in pids))


def _alive(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False


def test_setup_lines_run_before_everything_and_may_use_unset_variables(stage: Stage) -> None:
    stage.play(arrive='say "setup gave $GIVEN"')
    stage.run(script(stage, "cluster.setup=['export GIVEN=x$NOT_SET_ANYWHERE']"))
    assert "setup gave x" in stage.calls


def test_runs_of_a_sweep_take_turns(tmp_path: Path) -> None:
    stages = [Stage(tmp_path / name) for name in ("a", "b")]
    clock = tmp_path / "clock"
    for each in stages:
        each.play(rank=f'echo begin >>"{clock}"; sleep 1; echo end >>"{clock}"')
    (tmp_path / "sweep" / "sbatch").mkdir(parents=True)
    started = [each.start(script(each, ranks=1, sweep_dir=tmp_path / "sweep")) for each in stages]
    assert [process.wait(timeout=PATIENCE_S) for process in started] == [0, 0]
    assert clock.read_text(encoding="utf-8").split() == ["begin", "end", "begin", "end"]


def test_a_run_that_waits_for_its_turn_can_be_told_to_go(tmp_path: Path) -> None:
    first, second = (Stage(tmp_path / name) for name in ("a", "b"))
    first.play(rank="say started; until [[ -e $HPCMOE_RUN_DIR/go ]]; do sleep 0.1; done")
    (tmp_path / "sweep" / "sbatch").mkdir(parents=True)
    running = first.start(script(first, ranks=1, sweep_dir=tmp_path / "sweep"))
    until(lambda: "started" in first.calls)
    waiting = second.start(script(second, ranks=1, sweep_dir=tmp_path / "sweep"))
    until(lambda: "flock" in _children(waiting.pid))
    os.kill(waiting.pid, signal.SIGTERM)
    assert waiting.wait(timeout=PATIENCE_S) == 143
    assert second.calls == []
    (first.run_dir / "go").touch()
    assert running.wait(timeout=PATIENCE_S) == 0


def _children(pid: int) -> list[str]:
    """The commands that a process has started and that still run."""
    names = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split():
        with contextlib.suppress(FileNotFoundError):
            names.append(Path(f"/proc/{child}/comm").read_text(encoding="utf-8").strip())
    return names
