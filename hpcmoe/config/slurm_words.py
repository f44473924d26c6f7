"""Values of slurm.* that have a form of their own: refused here, in one line, rather than by sbatch after the run was made.

Not for names that only the site knows (partition, qos, account): Slurm says no to those itself.
"""

from __future__ import annotations

import re

from hpcmoe.config.schema import SlurmConfig
from hpcmoe.errors import UserError, unknown_name

MAIL_TYPES = (
    "NONE",
    "BEGIN",
    "END",
    "FAIL",
    "REQUEUE",
    "ALL",
    "INVALID_DEPEND",
    "STAGE_OUT",
    "TIME_LIMIT",
    "TIME_LIMIT_50",
    "TIME_LIMIT_80",
    "TIME_LIMIT_90",
    "ARRAY_TASKS",
)
DEPENDENCIES = ("after", "afterany", "afterburstbuffer", "aftercorr", "afternotok", "afterok", "expand", "singleton")
MOST_NICE = 2147483645  # sbatch's own limit, both ways

_CLOCK = r"(?:(?:[01]?\d|2[0-3]):[0-5]\d(?::[0-5]\d)?(?:\s*[AP]M)?|midnight|noon|elevenses|fika|teatime)"
_MONTH, _DAY = r"(?:0?[1-9]|1[0-2])", r"(?:0?[1-9]|[12]\d|3[01])"
_DATE = rf"(?:today|tomorrow|\d{{4}}-{_MONTH}-{_DAY}|{_MONTH}[/.]{_DAY}(?:[/.](?:\d\d){{1,2}})?|\d{{6}})"
_LATER = r"now(?:\s*[+-]\s*\d+\s*(?:(?:second|minute|hour|day|week)s?)?)?"
_BEGIN = re.compile(rf"{_LATER}|{_CLOCK}(?:\s*{_DATE})?|{_DATE}(?:[\sT-]*{_CLOCK})?", re.IGNORECASE | re.ASCII)
_JOBS = re.compile(r"(?::\d+(?:_(?:\d+|\*))?(?:\+\d+)?)+", re.ASCII)


def check_slurm_words(slurm: SlurmConfig) -> None:
    """Raises UserError for the first value that sbatch could not read."""
    _check_mail_type(slurm.mail_type)
    if slurm.nice is not None and abs(slurm.nice) > MOST_NICE:
        raise UserError(f"slurm.nice={slurm.nice} must be between -{MOST_NICE} and {MOST_NICE}")
    if slurm.begin is not None and not _BEGIN.fullmatch(slurm.begin.strip()):
        forms = "now+2hours (seconds, minutes, hours, days or weeks), 16:00, tomorrow, 2027-01-20 or 2027-01-20T12:34:00"
        raise UserError(f"slurm.begin={slurm.begin!r} is not a time of Slurm's; write it as {forms}")
    if slurm.dependency is not None:
        _check_dependency(slurm.dependency)


def _check_mail_type(value: str | None) -> None:
    if value is None:
        return
    for word in value.split(","):
        if word.strip().upper() not in MAIL_TYPES:
            raise UserError(unknown_name("slurm.mail_type", word.strip().upper(), MAIL_TYPES))


def _check_dependency(value: str) -> None:
    if "," in value and "?" in value:
        raise UserError(f"slurm.dependency={value!r}: ',' (all of them) and '?' (any of them) do not go together")
    for part in re.split("[,?]", value):
        kind, colon, rest = part.partition(":")
        jobs = colon + rest
        if re.fullmatch(r"\d+", part, re.ASCII):
            continue  # an old form of afterany, which Slurm still takes
        if kind.lower() not in DEPENDENCIES:
            raise UserError(unknown_name("kind of slurm.dependency", kind, DEPENDENCIES))
        if kind.lower() == "singleton" and not jobs:
            continue
        if not _JOBS.fullmatch(jobs):
            raise UserError(f"slurm.dependency={value!r}: {part!r} must name jobs, such as {kind}:1234 or {kind}:1234_5:1240")
