"""hpcmoe: Slurm-native orchestration and training of Mixture-of-Experts language models.

Importing this package costs nothing: no torch, no Hydra. Each room is imported by the verb that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcmoe.runs.results import Results

__version__ = "0.1.0.dev0"


def load_sweep(sweep: str = "latest", best: str | None = None, highest: bool = False) -> Results:
    """A sweep's results, as `hpcmoe sweep results` has them: ``.frame()`` for pandas, ``.rows()`` without it.

    ``sweep``: an id, the beginning of one, ``latest`` or a directory; ``best``: a figure to give a column ``best_<figure>``, by
    its lowest value or, with ``highest``, its highest one. Raises hpcmoe.errors.UserError, a ValueError.
    """
    from hpcmoe.runs.results import load_sweep as load

    return load(sweep, best, highest)
