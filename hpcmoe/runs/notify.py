"""Telling people that a run ended, failed or stands still: by mail, webhook or a command of theirs. Each at most once per event.

What is due is a pure function of the run. Whoever looks at runs where there is network sends it (supervise, wait, watch; a job
script at its end), journals that, and is never kept from its own work for long. Not for Slurm's own mails (slurm.mail_type).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpcmoe.runs.glance import glance
from hpcmoe.runs.journal import Journal, read_journal
from hpcmoe.runs.life import JobView
from hpcmoe.runs.observe import RunView
from hpcmoe.runs.observe import view as view_of
from hpcmoe.runs.rundir import RunDir
from hpcmoe.runs.store import Record, raw_config, read_record

WEBHOOK_TIMEOUT_S, PROGRAM_TIMEOUT_S = 10.0, 30.0
ROUND_S = 20.0  # no sending begins later than this in one round: the caller has runs to look after
LOST_S = 600.0  # a job gone without a word for so long will not be brought back by itself
OLD_S = 3 * 86400.0  # an end that nobody looked at for so long is no news
MOST_TRIES, RETRY_S = 5, 300.0  # the wait doubles with each try
SBIN = "/usr/sbin:/usr/lib"


@dataclass(frozen=True)
class Notice:
    """Something that people asked to be told."""

    what: str  # end | failure | stall
    about: str  # names this very event; a notice is sent once for it
    says: str


def wishes(settings: Any) -> dict[str, Any] | None:
    """What the journal's first line keeps of ``config.notify``, so that a look at a thousand runs opens no config; None: nothing.

    Where to send it is not kept there: a webhook's address may be a secret.
    """
    where = [name for name in _SENDERS if getattr(settings, name)]
    return {"where": where, "events": list(settings.events), "stall_s": 60.0 * settings.stall_minutes} if where else None


def due(view: RunView, now: float, stall_s: float) -> Notice | None:
    """What there is to tell of the run now, whether it was told already or not. Times are in seconds."""
    record, run_id = view.record, view.record.run.run_id
    why = f": {view.reason}" if view.reason else ""
    ended = record.finished
    if ended is not None:
        if now - float(ended["t"]) > OLD_S or record.life.paused_at is not None:  # a sweep's early stopping is no news
            return None
        what = "failure" if ended["state"] == "FAILED" else "end"
        return Notice(what, f"{ended['state']}-{float(ended['t']):.3f}", f"run {run_id} is {ended['state']}{why}")
    if view.state == "RUNNING":
        return _stall(view, now, stall_s)
    lost = view.state == "UNKNOWN" and view.job.reachable
    if (lost or (view.state == "STOPPED" and view.involuntary)) and now - _last_sign(record) > LOST_S:
        words = f"run {run_id} is {view.state}{why}; `hpcmoe resume {run_id}` would continue it"
        return Notice("failure", f"{view.state}-{record.job_id}", words)
    return None


def _last_sign(record: Record) -> float:
    return max(record.gist.sign, float((record.last_line or {}).get("t") or 0.0))


def _stall(view: RunView, now: float, stall_s: float) -> Notice | None:
    """No step for too long: since the newest one, or since the attempt started."""
    record = view.record
    if record.gist.started is None or not record.steps_seen:
        return None
    line = record.last_line or {}
    attempt, started = record.gist.started
    since = max(started, float(line.get("t") or 0.0))
    if now - since < stall_s:
        return None
    step = line.get("step", 0)
    suspended = "; Slurm has suspended its job" if view.job.state == "SUSPENDED" else ""
    words = (
        f"run {record.run.run_id} runs and has made no step for {(now - since) / 60:.0f} minutes, since step {step}{suspended}"
    )
    return Notice("stall", f"stall-{attempt}-{step}", words)


def send_due(views: Sequence[RunView], now: float, say: Callable[[str], None] = lambda line: None) -> None:
    """Send what is due and was not sent. Never raises for what a notice meets on its way; ``say`` gets failures."""
    began = time.monotonic()
    for view in views:
        wanted = view.record.planned.get("notify")
        if not wanted or not _own(view.record.run):
            continue
        notice = due(view, now, float(wanted["stall_s"]))
        if notice is None or notice.what not in wanted["events"]:
            continue
        for where in wanted["where"]:
            if _may_try(view.record.events, notice, where, now):
                if time.monotonic() - began > ROUND_S:
                    return  # the rest waits for the next look
                try:
                    _send_once(view, notice, where, now, say)
                except OSError as problem:  # the run directory; the next look may find it well
                    say(f"run {view.record.run.run_id}: what {where} was told could not be journalled: {problem}")


def send_end(run: RunDir) -> None:
    """From a run's last job, for those who follow it from nowhere: it is told where the node has network."""
    try:
        record, now = read_record(run), time.time()
        if record.finished is not None:
            send_due([view_of(record, JobView(), now)], now)
    except Exception as problem:  # the job has its own end to see to
        print(f"hpcmoe: nobody was told of the end of run {run.run_id}: {problem}", file=sys.stderr)


def _own(run: RunDir) -> bool:
    """Only the run's owner sends: a notice may be a command, which must not run as somebody who merely looks on."""
    try:
        return run.path.stat().st_uid == os.getuid()
    except OSError:
        return False


def _may_try(events: Sequence[Mapping[str, Any]], notice: Notice, where: str, now: float) -> bool:
    """It was not sent yet, nor tried too often or a moment ago."""
    tries = [e for e in events if e["event"] == "notified" and e.get("about") == notice.about and e.get("where") == where]
    if any(event.get("ok") for event in tries) or len(tries) >= MOST_TRIES:
        return False
    return not tries or now - float(tries[-1]["t"]) >= RETRY_S * 2 ** (len(tries) - 1)


def _send_once(view: RunView, notice: Notice, where: str, now: float, say: Callable[[str], None]) -> None:
    run = view.record.run
    with _sole_sender(run, notice, where) as sole:
        # the journal anew: another sender may just have tried
        if sole is None or not _may_try(read_journal(run.journal), notice, where, now):
            return
        try:
            settings = raw_config(run).get("notify") or {}
            _SENDERS[where](settings[where], document(view, notice, now))
            error = None
        except Exception as problem:  # whatever it is, the run and its supervisor go on
            error = f"{type(problem).__name__}: {' '.join(str(problem).split())}"[:300]
        sole.sent = error is None  # before the journal: a full disk must not have it sent again
        Journal(run.journal).append(
            "notified",
            what=notice.what,
            about=notice.about,
            where=where,
            ok=error is None,
            error=error,
            host=socket.gethostname(),
        )
        if error is not None:
            say(f"run {run.run_id}: {where} could not be told of the {notice.what}: {error}")


@dataclass
class _Sole:
    sent: bool = False


@contextlib.contextmanager
def _sole_sender(run: RunDir, notice: Notice, where: str) -> Iterator[_Sole | None]:
    """Makes a file that only one process can make; it is taken away again unless the notice was ``sent``.

    None: another one sends this notice, has sent it, or died while it was sending, which may have been after the sending.
    """
    path = run.path / "notified" / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', notice.about)}-{where}"
    try:
        path.parent.mkdir(exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except OSError:
        yield None
        return
    sole = _Sole()
    try:
        yield sole
    except OSError:
        if not sole.sent:
            path.unlink(missing_ok=True)
        raise
    if not sole.sent:
        path.unlink(missing_ok=True)


def document(view: RunView, notice: Notice, now: float) -> dict[str, Any]:
    """What a webhook or a command gets. ``text`` is what Slack and Mattermost show; times are epoch seconds."""
    run = glance(view, now)
    kept = ("run_id", "name", "state", "reason", "run_dir", "job_id", "step", "steps", "loss", "attempt_count", "gpu_hours")
    facts = asdict(run)
    return {"event": notice.what, "text": f"hpcmoe: {notice.says}", **{key: facts[key] for key in kept}, "t": now}


def _post(url: str, facts: Mapping[str, Any]) -> None:
    import urllib.request

    headers = {"Content-Type": "application/json", "User-Agent": "hpcmoe"}
    request = urllib.request.Request(url, json.dumps(facts).encode(), headers, method="POST")
    with urllib.request.urlopen(request, timeout=WEBHOOK_TIMEOUT_S):
        pass  # any 2xx; the others raise


def _run_program(argv: Sequence[str], text: str) -> None:
    done = subprocess.run(list(argv), input=text, text=True, capture_output=True, timeout=PROGRAM_TIMEOUT_S)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise RuntimeError(f"{argv[0]} exited with {done.returncode}: {last}")


def mail_program() -> str | None:
    """sendmail or mail, if this host has one."""
    return shutil.which("sendmail", path=f"{os.environ.get('PATH', '')}:{SBIN}") or shutil.which("mail")


def _mail(to: str, facts: Mapping[str, Any]) -> None:
    addresses = [address.strip() for address in to.split(",")]
    subject = " ".join(str(facts["text"]).split())[:150]
    body = "\n".join(f"{key}: {value}" for key, value in facts.items() if key != "text") + "\n"
    program = mail_program()
    if program is None:
        raise RuntimeError(f"neither sendmail nor mail on {socket.gethostname()}")
    if program.endswith("sendmail"):
        _run_program([program, "-t", "-oi"], f"To: {', '.join(addresses)}\nSubject: {subject}\n\n{facts['text']}\n\n{body}")
    else:
        _run_program([program, "-s", subject, *addresses], f"{facts['text']}\n\n{body}")


_SENDERS: dict[str, Callable[[Any, Mapping[str, Any]], None]] = {
    "mail": _mail,
    "webhook": _post,
    "command": lambda argv, facts: _run_program(argv, json.dumps(facts) + "\n"),
}
