"""What a feature beside the training loop may be: the moments at which it is called. All of them may be left out.

Not for what makes a step a step. Every rank has the same callbacks in the same order, so that one may use collectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from hpcmoe.engine.agreement import Agreed
from hpcmoe.engine.verdict import Source

# In the order in which a rank goes through them; those from "data" on belong to a step.
Phase = Literal["rendezvous", "corpus", "build", "load", "data", "compute", "agree", "update", "evaluate", "save"]
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True)
class Evaluated:
    """An evaluation's result, the same on every rank."""

    step: int  # after this many updates
    loss: float  # mean cross entropy of the tokens, nats
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Told:
    """What a callback has to tell the loop. The same on every rank, but for the words."""

    stop: Source | None = None  # it heard a stop request, and what it did is cut short; or it makes one itself
    evaluated: Evaluated | None = None
    save: bool = False  # a checkpoint of this step is wanted
    why: str | None = None  # of the stop, for people; rank 0's


NOTHING = Told()


class Callback:
    """A feature that does nothing yet. ``step`` counts updates from 1."""

    name: ClassVar[str]  # of its state in the checkpoint

    def state(self) -> Any:
        """What a resumed run must know, as JSON values; None: nothing."""
        return None

    def restore(self, state: Any) -> None:
        """Continue from what ``state`` gave."""

    def before_training(self, step: int) -> Told:
        """Once, when weights and data are there; ``step`` is the last one that was done."""
        return NOTHING

    def entering(self, step: int, phase: Phase) -> None:
        """The loop turns to this part of its work. Called often: be quick."""

    def before_step(self, step: int) -> None:
        """Before the step's data is read."""

    def reason_to_skip(self, step: int, agreed: Agreed) -> str | None:
        """After backward, before the update. Decide from ``agreed`` and the state alone: all ranks must decide alike."""
        return None

    def after_step(self, step: int, agreed: Agreed, skipped: str | None) -> Told:
        """The update is done, or was ``skipped`` for that reason; its line is not written yet."""
        return NOTHING

    def evaluated(self, result: Evaluated) -> None:
        """A callback before this one, or after it, has evaluated the model."""

    def before_leaving(self, step: int, source: Source | None) -> None:
        """All ranks agreed to leave (None: training is complete); nothing is saved yet."""

    def close(self) -> None:
        """Everything is durable."""
