"""The doctor on a real Slurm, as an ordinary user: it only reads."""

from __future__ import annotations

import json

import pytest

from tests.slurm.night import hpcmoe
from tests.slurm.testbed_client import Testbed

pytestmark = pytest.mark.timeout(600)


def test_an_ordinary_user_is_told_what_happens_to_a_preempted_run(testbed: Testbed, ordinary_user: str) -> None:
    testbed.set_user_signal(False)
    runs = testbed.shared_folder("doctor")
    done = hpcmoe(
        testbed, runs, ordinary_user, "doctor", "cluster=testbed", "slurm.partition=cancel_grace", "--json", check=False
    )
    document = json.loads(done.stdout)
    says = {(one["topic"], one["level"]) for one in document["findings"]}
    assert done.returncode == 0, document
    preempted = "jobs of high preempt a run (CANCEL): SIGTERM in its ranks, then 8 s of grace, then 30 s until SIGKILL"
    assert any(one["says"].startswith(preempted) for one in document["findings"]), document
    assert {("account", "ok"), ("profile", "ok"), ("partition", "ok")} <= says, document
    assert not [one for one in document["findings"] if "could not be asked" in one["says"]], document
