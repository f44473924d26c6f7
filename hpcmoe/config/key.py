"""A configuration's key: equal for two runs that would end with the same result. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

# What says where, when and how safely a run trains, and not what comes out of it.
NO_PART = frozenset({"name", "cluster", "slurm", "spare_nodes", "resilience", "notify", "sweep"})
KEY_DIGITS = 16


def config_key(plain: Mapping[str, Any]) -> str:
    """A hash of what decides the result, from the configuration as plain values (hpcmoe.config.freeze.to_plain)."""
    decides = {name: value for name, value in plain.items() if name not in NO_PART}
    text = json.dumps(decides, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]
