"""What `hpcmoe status RUN` says of checkpoints, resumes and goodput. Text only; the facts are hpcmoe.runs.saves' and story's."""

from __future__ import annotations

from collections.abc import Sequence

from hpcmoe.cli.words import ago
from hpcmoe.runs.saves import Certificate, Saves
from hpcmoe.runs.story import Goodput
from hpcmoe.text import duration

SHOWN_IDS = 8
WORDS = {"identical": "bit-identical", "differs": "DIFFERS", "not_comparable": "not comparable"}


def save_lines(saves: Saves, now: float) -> list[str]:
    lines = []
    if saves.step is not None:
        cost = "" if saves.save_s is None else f", saved in {saves.save_s:.1f} s"
        lines.append(f"newest checkpoint: step {saves.step}{cost}")
    if saves.failed_in_a_row and saves.failed is not None:
        many = "the last save" if saves.failed_in_a_row == 1 else f"the last {saves.failed_in_a_row} saves"
        lines.append(f"SAVING FAILS: {many} failed, the latest {ago(saves.failed, now)}: {saves.reason}")
    if saves.interval_steps is not None:
        about = "" if saves.interval_s is None else f", about {duration(saves.interval_s)}"
        lines.append(f"a checkpoint every {saves.interval_steps} steps{about} ({saves.interval_why})")
    if saves.lead_need_s is not None:
        cure = "the ranks leave by themselves in time" if saves.leaves_by_itself else "raise resilience.stop_lead_s"
        lines.append(
            f"WARNING: a step and a save need {saves.lead_need_s:.0f} s before the job's end, "
            f"resilience.stop_lead_s is {saves.stop_lead_s:.0f} s: {cure}"
        )
    return lines


def goodput_line(goodput: Goodput) -> str | None:
    if not goodput.all_steps:
        return None
    parts = [f"{_percent(goodput.of_steps)} of the steps done ({goodput.useful_steps} of {goodput.all_steps})"]
    parts.append(f"{_percent(goodput.of_held)} of {duration(goodput.held_s)} held")
    parts.append(f"{_percent(goodput.of_wall)} of {duration(goodput.wall_s)} since the first start")
    return "goodput: " + ", ".join(parts)


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.1f} %"


def certificate_text(certificates: Sequence[Certificate]) -> str:
    """Every resume: from what, with which samples next, and what is certified of it."""
    if not certificates:
        return "no resume yet: nothing to certify"
    counts = [f"{sum(one.verdict == verdict for one in certificates)} {words}" for verdict, words in WORDS.items()]
    lines = [f"{len(certificates)} resume{'s' * (len(certificates) > 1)}: {', '.join(counts)}"]
    for one in certificates:
        tokens = "tokens unknown" if one.tokens is None else f"{one.tokens} tokens"
        maker = f", made by attempt {one.made_by}" if one.made_by else ""
        lines.append(f"  {one.attempt} from {one.checkpoint} ({tokens}{maker})")
        if one.layout:
            lines.append(f"    on {one.ranks} ranks: {one.layout}")
        if one.samples:
            ids = ", ".join(str(number) for number in one.samples["ids"][:SHOWN_IDS])
            more = ", ..." if one.samples["count"] > SHOWN_IDS else ""
            lines.append(f"    next {one.samples['count']} samples: {ids}{more} (digest {one.samples['digest']})")
        lines.append(f"    step {one.step + 1} {WORDS[one.verdict]}: {_found(one)}")
    return "\n".join(lines)


def _found(one: Certificate) -> str:
    if one.verdict == "identical" and one.before:
        return f"loss {one.loss!r} and gradient norm {one.grad_norm!r}, as in attempt {one.before['attempt']}"
    return str(one.reason)
