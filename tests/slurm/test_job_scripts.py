"""Our scripts and our client on a real Slurm: quoting, arrays, a lost answer, what hides behind COMPLETING."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcmoe.runs.jobspec import JobSpec
from hpcmoe.slurm import client
from hpcmoe.slurm.command import SlurmRejected
from hpcmoe.slurm.directives import directive
from hpcmoe.slurm.submit import sbatch
from hydra_plugins.hpcmoe_launchers import executor_for
from tests.launchers.stage import Stage, config
from tests.slurm.testbed_client import Testbed

VALUES = [
    "it's",
    'a "b" c',
    "$HOME `date`",
    "\\ and \\\\'",
    "# no remark",
    "--flag",
    "a  b=JobState=FAILED | c",
    "%j %%",
    "ü €",
    "hetjob",
]


@pytest.fixture(autouse=True)
def here(testbed: Testbed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", testbed.env["SLURM_CONF"])
    monkeypatch.setenv("PATH", testbed.env["PATH"])


def until(true: Callable[[], object], timeout_s: float = 180.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)


def test_sbatch_reads_our_lines_as_they_were_meant(tmp_path: Path) -> None:
    script = tmp_path / "held.sh"
    ids = {}
    for value in VALUES:
        lines = ["#!/bin/bash", "#SBATCH --hold", directive("job-name", value), directive("comment", value), "true"]
        script.write_text("\n".join(lines), encoding="utf-8")
        ids[sbatch(script)] = value
    rows = client.squeue(ids)
    facts = {job_id: client.show_job(job_id) for job_id in ids}
    client.cancel(list(ids))
    assert {job_id: (row.name, row.comment) for job_id, row in rows.items()} == {i: (v, v) for i, v in ids.items()}
    assert {i: (f.name, f.comment, f.state) for i, f in facts.items() if f} == {i: (v, v, "PENDING") for i, v in ids.items()}


# A bad exit makes Slurm kill the other ranks, whose own exit codes would then count.
RANK_3_FAILS_LAST = """echo $$ >"$HPCMOE_RUN_DIR/pid-$SLURM_PROCID"
[[ $SLURM_PROCID == 3 ]] || exit 0
for other in 0 1 2; do
  until [[ -s $HPCMOE_RUN_DIR/pid-$other ]]; do sleep 0.1; done
  while kill -0 "$(<"$HPCMOE_RUN_DIR/pid-$other")" 2>/dev/null; do sleep 0.1; done
done
exit 9"""


def test_an_array_runs_in_directories_with_nasty_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_MEM_PER_CPU": "17", "SLURM_CPU_BIND": "quiet", "RANK": "5", "SBATCH_PARTITION": "nono"}.items():
        monkeypatch.setenv(name, value)  # as if submitted from inside another job
    stages = [Stage(tmp_path / name) for name in ("a", "b")]
    cfg = config("cluster=testbed", "nodes=2", "gpus_per_node=2", "slurm.partition=high")
    cfg.env = {"TRICKY": "a 'b' \"c\" $HOME"}
    tell = 'echo out; say "$SLURM_PROCID/$SLURM_NTASKS ${RANK-unset} $MASTER_ADDR $TRICKY"'
    for stage in stages:
        stage.play(rank=f"{tell}\n{RANK_3_FAILS_LAST}", depart="exit 5")
    runs = tuple(stage.run_dir for stage in stages)
    ids = executor_for(cfg, tmp_path).submit_run(
        JobSpec(runs, cfg, str(stages[0].python), "it's", "nasty-array", sweep_dir=tmp_path / "swe ep")
    )
    until(lambda: all(row.state == "FAILED" for row in client.squeue(ids).values()))
    for job_id, stage in zip(ids, stages, strict=True):
        assert stage.calls[0] == f"arrive {job_id}.0"
        assert stage.calls[-1] == "depart --rc 9 --heard "
        assert f"0/4 unset 127.0.0.1 {cfg.env['TRICKY']}" in stage.calls
        # what Slurm has to say of a step that it cancels comes after
        assert (stage.run_dir / "attempts" / f"{job_id}.0" / "rank-0000.log").read_text().startswith("out\n")
    until(lambda: [row.exit_code for row in client.sacct(ids, since=time.time() - 600)] == [5, 5])


def test_a_job_whose_answer_was_lost_is_found_and_not_submitted_twice(testbed: Testbed, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH --output=/dev/null --hold\n#SBATCH --comment=mine\ntrue\n")
    controller = int((testbed.root / "run" / "slurmctld.pid").read_text())
    os.kill(controller, signal.SIGSTOP)
    threading.Timer(13.0, os.kill, (controller, signal.SIGCONT)).start()  # MessageTimeout is 10 s
    job_id = sbatch(script, token="lost-answer")
    with_token = [
        i for i, row in client.squeue([job_id, str(int(job_id) + 1)]).items() if row.comment == "mine hpcmoe:lost-answer"
    ]
    client.cancel([job_id])
    assert with_token == [job_id]


# Leaves when it is told to go, which is after it was looked at; KillWait is longer.
LEAVES_SLOWLY = """#!/bin/bash
#SBATCH --output=/dev/null --requeue
[[ ${SLURM_RESTART_COUNT:-0} -gt 0 ]] && exit 0
trap '' TERM
touch "$FOLDER/$SLURM_JOB_ID"
until [[ -e $FOLDER/go ]]; do sleep 0.2; done
"""


def test_a_cancelled_job_is_told_from_a_requeued_one_while_both_are_leaving(testbed: Testbed) -> None:
    folder = testbed.shared_folder("leaving")
    options = ["--partition=high", f"--export=ALL,FOLDER={folder}"]
    cancelled, requeued = (testbed.sbatch(LEAVES_SLOWLY, *options) for _ in range(2))
    until(lambda: {cancelled, requeued} <= {path.name for path in folder.iterdir()})
    client.cancel([cancelled])
    gone = client.show_ending(cancelled)
    client.requeue(requeued)
    back = client.show_ending(requeued)
    (folder / "go").touch()
    assert gone is not None
    assert back is not None
    assert (gone.state, gone.ended_as, gone.requeueing) == ("COMPLETING", "CANCELLED", False)
    assert (back.state, back.ended_as, back.requeueing) == ("COMPLETING", "REQUEUED", True)
    with pytest.raises(SlurmRejected, match="CANCELLED"):
        client.requeue(cancelled)
    assert client.start_soon(requeued)
    testbed.wait_for(requeued, ["COMPLETED"])
    testbed.wait_for(cancelled, ["CANCELLED"])
