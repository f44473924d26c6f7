"""From Slurm's words to values and back: job ids, host lists, times, records and rows. Pure functions, no commands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

# The unit separator: it stands in no job name, comment or path that a person types.
SEPARATOR = "\x1f"

# ---- job ids ----------------------------------------------------------------------------------------------------------

_JOB_ID = re.compile(r"(?P<job>\d+)(?:\+(?P<het>\d+)|_(?:(?P<task>\d+)|\[(?P<tasks>[^\]%]*)(?P<end>[^\]]*\]?)))?")
_TASK_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


@dataclass(frozen=True)
class JobId:
    """A job id as Slurm prints it. ``tasks``: array task numbers; ``cut``: Slurm shortened the list, so it is not complete."""

    job: int
    tasks: tuple[int, ...] | None = None
    het: int | None = None
    cut: bool = False

    def each(self) -> list[str]:
        """The id of every single job: ``123``, ``123_4``, ``27+1``."""
        if self.tasks is not None:
            return [f"{self.job}_{task}" for task in self.tasks]
        return [str(self.job) if self.het is None else f"{self.job}+{self.het}"]


def parse_job_id(text: str) -> JobId:
    """``123``, ``123_4``, ``123_[0-5%2]``, ``25_[1-899:2%4]``, ``27+0``; with a cut list, what is certain of it.

    Raises ValueError for what is no job id.
    """
    match = _JOB_ID.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a Slurm job id")
    job = int(match["job"])
    if match["task"] is not None:
        return JobId(job, tasks=(int(match["task"]),))
    if match["tasks"] is not None:
        return _array_id(job, match["tasks"], closed=match["end"].endswith("]"))
    return JobId(job, het=None if match["het"] is None else int(match["het"]))


def _array_id(job: int, listed: str, closed: bool) -> JobId:
    cut = not closed or "..." in listed
    pieces = listed.replace("...", "").split(",")
    if cut and pieces:
        pieces.pop()  # cut in the middle of a number: "20" may have been "200"
    tasks: list[int] = []
    for piece in filter(None, pieces):
        match = _TASK_RANGE.fullmatch(piece)
        if match is None:
            raise ValueError(f"{piece!r} in the task list of job {job} is not a number or a range")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if step < 1:
            raise ValueError(f"the task list of job {job} has a step of {step}")
        tasks.extend(range(first, last + 1, step))
    return JobId(job, tasks=tuple(tasks), cut=cut)


def compress_job_ids(job_ids: Sequence[str]) -> list[str]:
    """Ids as scancel takes them: the tasks of one array in one word, ``41_[0-3,7]``."""
    tasks: dict[str, list[int]] = {}
    found: list[str] = []
    for job_id in job_ids:
        job, underscore, task = job_id.partition("_")
        if underscore:
            tasks.setdefault(job, []).append(int(task))
        else:
            found.append(job_id)
    for job, numbers in tasks.items():
        several = ",".join(_ranges(sorted(set(numbers)), 1))
        found.append(f"{job}_{several}" if len(numbers) == 1 else f"{job}_[{several}]")
    return found


def parse_submitted(stdout: str) -> str:
    """The job id that ``sbatch --parsable`` prints: ``ID`` or ``ID;cluster``. Raises ValueError when there is none."""
    for line in reversed(stdout.splitlines()):
        match = re.fullmatch(r"(\d+)(;\S+)?", line.strip())
        if match:
            return match[1]
    raise ValueError(f"sbatch printed no job id but {stdout.strip()!r}")


# ---- host lists -------------------------------------------------------------------------------------------------------


def _split_outside_brackets(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise ValueError(f"brackets do not match in the host list {text!r}")
        if char == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    if depth:
        raise ValueError(f"brackets do not match in the host list {text!r}")
    return [part for part in (*parts, text[start:]) if part]


def _expand_one(pattern: str) -> list[str]:
    head, bracket, rest = pattern.partition("[")
    if not bracket:
        return [pattern]
    inside, _, tail = rest.partition("]")
    numbers: list[str] = []
    for piece in inside.split(","):
        first, dash, last = piece.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"{piece!r} in the host list {pattern!r} is not a number or a range")
        numbers.extend(f"{n:0{len(first)}d}" for n in range(int(first), int(last or first) + 1))
    return [head + number + end for number in numbers for end in _expand_one(tail)]


def expand_hostlist(text: str) -> list[str]:
    """``lrdn[0001-0003,0010],login`` -> every host, in the list's order. Raises ValueError for unmatched brackets."""
    if text.strip() in ("", "(null)", "None assigned", "None"):
        return []
    return [host for pattern in _split_outside_brackets(text.strip()) for host in _expand_one(pattern)]


def compress_hostlist(hosts: Sequence[str]) -> str:
    """The inverse: neighbours that differ only in their last number, counted up by one, become one range."""
    groups: list[tuple[str, int, list[int]]] = []
    names: list[str] = []
    for host in hosts:
        match = re.fullmatch(r"(.*?)(\d+)", host, re.DOTALL)
        if match is None:
            groups.append((host, 0, []))
        elif groups and groups[-1][2] and groups[-1][:2] == (match[1], len(match[2])) and "[" not in match[1]:
            groups[-1][2].append(int(match[2]))
        else:
            groups.append((match[1], len(match[2]), [int(match[2])]))
    for head, width, numbers in groups:
        if len(numbers) < 2:
            names.append(head + "".join(f"{n:0{width}d}" for n in numbers))
        else:
            names.append(f"{head}[{','.join(_ranges(numbers, width))}]")
    return ",".join(names)


def _ranges(numbers: list[int], width: int) -> list[str]:
    pieces: list[list[int]] = []
    for number in numbers:
        if pieces and number == pieces[-1][-1] + 1:
            pieces[-1].append(number)
        else:
            pieces.append([number])
    return [f"{p[0]:0{width}d}" + (f"-{p[-1]:0{width}d}" if len(p) > 1 else "") for p in pieces]


# ---- times ------------------------------------------------------------------------------------------------------------

_NO_TIME = frozenset({"", "unknown", "none", "n/a", "(null)", "not_set", "invalid", "partition_limit"})
_UNLIMITED = frozenset({"unlimited", "infinite", "-1"})


def parse_duration(text: str) -> float | None:
    """Seconds of any of Slurm's time forms: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S (sbatch(1), --time). None: no limit, not known.

    Raises ValueError for anything else.
    """
    word = text.strip().lower()
    if word in _UNLIMITED or word in _NO_TIME:
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?(?:\.\d+)?", word)
    if match is None:
        raise ValueError(f"{text!r} is not one of Slurm's times: minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S")
    days, a, b, c = (None if part is None else int(part) for part in match.groups())
    assert a is not None
    if days is not None:
        return float(86400 * days + 3600 * a + 60 * (b or 0) + (c or 0))
    if c is not None:
        return float(3600 * a + 60 * (b or 0) + c)
    return float(60 * a + (b or 0))


def format_duration(seconds: float) -> str:
    """``[D-]HH:MM:SS``, rounded to whole seconds: a form that every Slurm command takes."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{h:02d}:{m:02d}:{s:02d}"


def parse_timestamp(text: str) -> float | None:
    """Epoch seconds of a point in time as Slurm prints it: epoch seconds, or local time in ISO form. None: not known."""
    word = text.strip()
    if word.lower() in _NO_TIME:
        return None
    if word.isdigit():
        return float(word) or None
    return datetime.fromisoformat(word).timestamp()


def format_timestamp(epoch_s: float) -> str:
    """Local time in the form that Slurm's options take."""
    return datetime.fromtimestamp(int(epoch_s)).strftime("%Y-%m-%dT%H:%M:%S")


def parse_seconds(text: str) -> float | None:
    """``30 sec``, ``300 sec``, ``N/A``, ``INFINITE`` of ``scontrol show config``; ``60`` and ``00:00:08`` of partitions."""
    word = text.strip()
    match = re.fullmatch(r"(\d+)(?: sec\w*)?", word)
    if match:
        return float(match[1])
    return parse_duration(word) if re.fullmatch(r"[\d:-]+", word) else None


# ---- records and rows -------------------------------------------------------------------------------------------------

# Free text: whatever stands behind such a key belongs to it, to the end of the line, however much it looks like more keys.
_FREE_TEXT = (
    "JobName",
    "Comment",
    "AdminComment",
    "SystemComment",
    "Command",
    "WorkDir",
    "StdErr",
    "StdIn",
    "StdOut",
    "SubmitLine",
)
_FREE = re.compile(rf"(?:^|\s)({'|'.join(_FREE_TEXT)})=(.*)$")
_KEY_VALUE = re.compile(r"(?:^|\s)([A-Za-z][\w/:]*)=")


def parse_records(text: str) -> list[dict[str, str]]:
    """Records of ``scontrol show job|partition|node`` in its several-lines form; a blank line ends a record.

    The one-line form (``-o``) is not read: a job name there can pretend to be any other field.
    """
    records: list[dict[str, str]] = []
    for block in re.split(r"\n[ \t]*\n", text):
        record: dict[str, str] = {}
        for line in block.splitlines():
            for key, value in _fields(line).items():
                record.setdefault(key, value)
        if record:
            records.append(record)
    return records


def _fields(line: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    free = _FREE.search(line)
    if free:
        fields[free[1]] = free[2].strip()
        line = line[: free.start()]
    keys = list(_KEY_VALUE.finditer(line))
    ends = [match.start() for match in keys[1:]] + [len(line)]
    for match, end in zip(keys, ends, strict=False):
        fields[match[1]] = line[match.end() : end].strip()
    return fields


def parse_config(text: str) -> dict[str, str]:
    """``Key = value`` lines of ``scontrol show config``."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def parse_rows(text: str, columns: int) -> list[list[str]]:
    """Rows with SEPARATOR between columns. A line with fewer columns is not a row (a message, a torn line) and is left out."""
    rows = (line.split(SEPARATOR) for line in text.splitlines())
    return [[cell.strip() for cell in row] for row in rows if len(row) == columns]
