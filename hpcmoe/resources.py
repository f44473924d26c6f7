"""Where conf/ and slurm_templates/ lie: inside the package (wheel) or beside it (checkout, editable install).

Not for user data: run directories are found by hpcmoe.runs.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def resource_dir(name: str) -> Path:
    """The directory ``conf`` or ``slurm_templates`` of this installation."""
    for base in (PACKAGE, PACKAGE.parent):
        if (base / name).is_dir():
            return base / name
    raise FileNotFoundError(f"hpcmoe is installed without its {name}/ (looked in {PACKAGE} and {PACKAGE.parent})")


def make_plugins_importable() -> None:
    """In a bare checkout, put launchers/ on the path so that hydra_plugins.hpcmoe_launchers can be imported."""
    beside = PACKAGE.parent / "launchers"
    if not beside.is_dir() or str(beside) in sys.path:
        return
    try:
        found = importlib.util.find_spec("hydra_plugins.hpcmoe_launchers") is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        sys.path.append(str(beside))
