"""The precision of a run that names none: bf16 on clusters with GPUs, fp32 on CPUs. plan, submit and the check ask here.

Not for what a GPU can do (hpcmoe.config.validate).
"""

from __future__ import annotations

from hpcmoe.config.schema import Config, Precision


def precision_of(config: Config) -> Precision:
    """The precision that ``config`` trains in, named or not."""
    if config.precision.name is not None:
        return config.precision.name
    return Precision.bf16 if config.cluster.device == "cuda" else Precision.fp32
