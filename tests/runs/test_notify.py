"""People are told once of an end, a failure, a stall; by whoever finds it untold; what goes wrong hurts no run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcmoe.config.compose import load
from hpcmoe.config.validate import validate
from hpcmoe.files import write_json
from hpcmoe.runs import notify
from hpcmoe.runs.create import create_run
from hpcmoe.runs.depart import depart
from hpcmoe.runs.glance import Glancer
from hpcmoe.runs.journal import Journal, read_journal
from hpcmoe.runs.life import JobView
from hpcmoe.runs.notify import due, send_due, send_end
from hpcmoe.runs.observe import RunView, view
from hpcmoe.runs.place import Place
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.store import Record, finish, read_record
from hpcmoe.runs.supervise import one_round

NOW = 100_000.0


# ---- what is due ------------------------------------------------------------------------------------------------------


def seen(job: JobView, *events: tuple[float, str, dict[str, Any]], stepped: float | None = None) -> RunView:
    told = [{"t": t, "event": name, "attempt": None, **fields} for t, name, fields in events]
    metrics = [] if stepped is None else [{"step": 41, "t": stepped, "attempt": "7.0"}]
    return view(Record(RunDir(Path("/runs/abc123")), told, metrics), job, NOW)


STARTED = (NOW - 5000, "attempt_started", {"attempt": "7.0", "job_id": "7", "restart": 0})
SUBMITTED = (NOW - 6000, "submitted", {"job_id": "7"})


@pytest.mark.parametrize(
    ("now", "what"),
    [
        (seen(JobView("RUNNING"), SUBMITTED, STARTED, stepped=NOW - 50), None),
        (seen(JobView("RUNNING"), SUBMITTED, STARTED, stepped=NOW - 2000), "stall"),
        (seen(JobView("RUNNING"), SUBMITTED, STARTED), "stall"),  # not even its first step
        (seen(JobView("RUNNING"), (NOW - 7000, "planned", {"steps_seen": False}), SUBMITTED, STARTED), None),  # a silent command
        (seen(JobView("RUNNING"), SUBMITTED, (NOW - 50, "attempt_started", STARTED[2]), stepped=NOW - 9000), None),
        (seen(JobView("PENDING"), SUBMITTED), None),
        (seen(JobView("RUNNING"), SUBMITTED), None),  # its job script has only just begun
        (seen(JobView(), SUBMITTED, (NOW, "finished", {"state": "COMPLETED"})), "end"),
        (seen(JobView(), SUBMITTED, (NOW, "finished", {"state": "CANCELLED"})), "end"),
        (seen(JobView(), SUBMITTED, (NOW, "rested", {"state": "STOPPED"})), "end"),
        (seen(JobView(), SUBMITTED, (NOW, "finished", {"state": "FAILED"})), "failure"),
        (seen(JobView("NODE_FAIL"), SUBMITTED, STARTED), "failure"),  # and nobody brought it back
        (seen(JobView("NODE_FAIL"), SUBMITTED, (NOW - 60, "attempt_started", STARTED[2])), None),  # somebody may yet
        (seen(JobView(), SUBMITTED, STARTED), "failure"),  # forgotten by Slurm
        (seen(JobView(reachable=False, problem="down"), SUBMITTED, STARTED), None),  # blind: nothing is known
    ],
)
def test_what_there_is_to_tell(now: RunView, what: str | None) -> None:
    notice = due(now, NOW, 1800.0)
    assert (notice and notice.what) == what


def test_a_stall_is_one_event_however_long_it_lasts_and_another_one_after_another_step() -> None:
    notices = [due(seen(JobView("RUNNING"), SUBMITTED, STARTED, stepped=NOW - old), NOW, 1800.0) for old in (2000, 4000)]
    assert notices[0] is not None
    assert notices[1] is not None
    assert notices[0].about == notices[1].about
    assert "no step for 33 minutes, since step 41" in notices[0].says


# ---- sending ----------------------------------------------------------------------------------------------------------


class Hook:
    """A web server of this test's own."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.answer = 200
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.headers["Content-Type"] == "application/json"
                hook.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                time.sleep(0.05)
                self.send_response(hook.answer)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    monkeypatch.setenv("no_proxy", "*")
    server = Hook()
    yield server
    server.server.shutdown()
    server.server.server_close()


def run_with(folder: Path, events: tuple[str, ...] = ("end", "failure", "stall"), **where: Any) -> RunDir:
    run = RunDir(folder / "abc123")
    run.path.mkdir()
    run.config.write_text(yaml.safe_dump({"notify": {"events": list(events), **where}}))
    wanted = {"where": list(where), "events": list(events), "stall_s": 1800.0}
    Journal(run.journal).append("planned", name="told", steps=60, notify=wanted)
    Journal(run.journal).append("submitted", job_id="7")
    return run


def look(run: RunDir, later_s: float = 0.0) -> list[str]:
    """Someone looks at the run; what they are told of failures."""
    now, said = time.time() + later_s, list[str]()
    send_due([view(read_record(run), JobView(), now)], now, said.append)
    return said


def notified(run: RunDir) -> list[tuple[str, bool]]:
    return [(event["where"], event["ok"]) for event in read_journal(run.journal) if event["event"] == "notified"]


def test_eight_who_look_at_once_tell_once(tmp_path: Path, hook: Hook) -> None:
    run = run_with(tmp_path, webhook=hook.url)
    finish(run, "FAILED", "loss is not finite")
    threads = [threading.Thread(target=look, args=(run,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    look(run)
    [told] = hook.got
    assert told["text"] == "hpcmoe: run abc123 is FAILED: loss is not finite"
    assert (told["event"], told["state"], told["steps"], told["job_id"]) == ("failure", "FAILED", 60, "7")
    assert notified(run) == [("webhook", True)]


def test_what_could_not_be_told_is_recorded_and_tried_again_later_but_not_for_ever(tmp_path: Path, hook: Hook) -> None:
    run = run_with(tmp_path, webhook=hook.url)
    finish(run, "COMPLETED", None)
    hook.answer = 503
    assert "webhook could not be told of the end: HTTPError: HTTP Error 503" in look(run)[0]
    assert look(run) == []  # too soon
    assert len(look(run, later_s=301)) == 1
    hook.answer = 200
    assert look(run, later_s=1000) == []
    assert notified(run) == [("webhook", False), ("webhook", False), ("webhook", True)]
    look(run, later_s=2e5)
    assert len(hook.got) == 3


def test_a_webhook_that_never_answers_is_given_up_in_the_end(tmp_path: Path) -> None:
    run = run_with(tmp_path, webhook="http://127.0.0.1:9/")  # nobody listens there
    finish(run, "COMPLETED", None)
    for number in range(9):
        look(run, later_s=number * 2e4)
    assert notified(run) == [("webhook", False)] * notify.MOST_TRIES


def test_an_end_of_last_week_is_no_news(tmp_path: Path, hook: Hook) -> None:
    run = run_with(tmp_path, webhook=hook.url)
    finish(run, "COMPLETED", None)
    look(run, later_s=notify.OLD_S + 1)
    assert hook.got == []


def test_a_supervisor_tells_of_a_run_that_its_own_job_has_ended(tmp_path: Path, hook: Hook) -> None:
    run = run_with(tmp_path, webhook=hook.url)
    finish(run, "COMPLETED", None)
    assert one_round(tmp_path, Glancer()).deeds == []
    assert [told["state"] for told in hook.got] == ["COMPLETED"]
    hook.answer = 500
    Journal(run.journal).append("submitted", job_id="8", how="resume")
    finish(run, "FAILED", "x")
    [deed] = one_round(tmp_path, Glancer()).deeds
    assert (deed["run_id"], deed["did"]) == ("abc123", "not_told")


def test_a_sender_that_died_is_not_repeated(tmp_path: Path, hook: Hook) -> None:
    """It may have died just after it sent."""
    run = run_with(tmp_path, webhook=hook.url)
    finish(run, "COMPLETED", None)
    notice = due(view(read_record(run), JobView(), time.time()), time.time(), 1.0)
    assert notice is not None
    held = notify._sole_sender(run, notice, "webhook")
    held.__enter__()
    look(run)
    assert hook.got == []


def program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_command_gets_the_document_on_its_standard_input(tmp_path: Path) -> None:
    argv = [program(tmp_path / "tell me", 'cat >"$1"'), str(tmp_path / "a file")]
    run = run_with(tmp_path, command=argv)
    finish(run, "CANCELLED", "cancelled by its user")
    send_end(run)
    assert json.loads((tmp_path / "a file").read_text())["state"] == "CANCELLED"
    assert notified(run) == [("command", True)]


def test_a_journal_that_cannot_be_written_stops_nobody_and_sends_nothing_twice(
    tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with(tmp_path, webhook=hook.url)
    finish(run, "COMPLETED", None)

    def full(*words: object, **fields: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(notify.Journal, "append", full)
    assert "could not be journalled: [Errno 28]" in look(run)[0]
    look(run, later_s=1e4)
    assert len(hook.got) == 1


def test_a_run_s_last_job_tells_of_its_end(tmp_path: Path) -> None:
    argv = [program(tmp_path / "tell", f"cat >{tmp_path}/told")]
    config = validate(load(["cluster=local", "model=tiny", f"notify.command={json.dumps(argv)}"]))
    run = create_run(config, [], tmp_path / "runs")
    attempt = Place("local-1.0", "local-1", 0, nodes=1, nodelist="here", scheduler="local")
    Journal(run.journal).append("submitted", job_id="local-1")
    Journal(run.journal, "local-1.0").append("attempt_started", job_id="local-1", restart=0, nodes=1, gpus=0)
    write_json(run.verdict("local-1.0"), {"verdict": "completed"})
    assert depart(run, attempt, 0, frozenset()) == 0
    assert json.loads((tmp_path / "told").read_text())["text"] == f"hpcmoe: run {run.run_id} is COMPLETED"


def test_mail_goes_through_sendmail_or_says_that_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "SBIN", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    run = run_with(tmp_path, mail="a@b.org, c@d.org")
    finish(run, "COMPLETED", None)
    if notify.mail_program() is None:
        assert "neither sendmail nor mail" in look(run)[0]
    program(tmp_path / "sendmail", f"cat >{tmp_path}/letter")
    look(run, later_s=1e5)
    head, _, body = (tmp_path / "letter").read_text().partition("\n\n")
    assert head == "To: a@b.org, c@d.org\nSubject: hpcmoe: run abc123 is COMPLETED"
    assert "step: 0\nsteps: 60" in body


def test_a_program_that_fails_gives_its_last_words(tmp_path: Path) -> None:
    run = run_with(tmp_path, command=[program(tmp_path / "x", "echo first >&2; echo last words >&2; exit 3")])
    finish(run, "COMPLETED", None)
    assert "exited with 3: last words" in look(run)[0]


def test_only_what_was_asked_for_is_told(tmp_path: Path, hook: Hook) -> None:
    run = run_with(tmp_path, events=("failure",), webhook=hook.url)
    finish(run, "COMPLETED", None)
    look(run)
    assert hook.got == []


def test_somebody_else_s_run_is_looked_at_only(tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_with(tmp_path, webhook=hook.url)
    finish(run, "COMPLETED", None)
    monkeypatch.setattr(notify.os, "getuid", lambda: 4321)
    look(run)
    assert (hook.got, notified(run)) == ([], [])


def test_a_run_directory_that_cannot_be_written_to_does_not_stop_who_looks(tmp_path: Path, hook: Hook) -> None:
    run = run_with(tmp_path, webhook=hook.url)
    finish(run, "COMPLETED", None)
    (run.path / "notified").write_text("a file, so that no folder can be made there")
    assert look(run) == []
    assert hook.got == []
