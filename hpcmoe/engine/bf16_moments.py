"""AdamW whose moments are stored in bf16: 12 bytes of state a parameter instead of 16. The arithmetic is fp32, and deterministic.

Moments are rounded to the nearest bf16 value once a step. Not for betas so close to 1 that a step's change is lost in rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpcmoe.engine.support import betas_violation
from hpcmoe.errors import UserError


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``tensor``, in the same memory. Not for what is to be differentiated."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class AdamWBf16Moments(torch.optim.Optimizer):
    """Loshchilov & Hutter 2019, algorithm 2. Parameters are fp32, on any meshes: each rank updates its own parts.

    State by parameter, with torch.optim.AdamW's names: ``step`` fp32 scalar, ``exp_avg`` and ``exp_avg_sq`` bf16 of its shape.
    """

    def __init__(
        self, params: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0
    ) -> None:
        problem = betas_violation(list(betas))
        if problem is not None:
            raise UserError(problem)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, local(parameter.grad).float(), group)

    def _update(self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        """One parameter at a time: its moments in fp32 are the only memory that a step takes beside its state."""
        state = self.state[parameter]
        if not state:
            state.update(new_moments(parameter, torch.bfloat16, torch.device("cpu")))
        state["step"] += 1
        step = float(state["step"])
        values = local(parameter)
        stored_mean, stored_square = local(state["exp_avg"]), local(state["exp_avg_sq"])
        beta1, beta2 = group["betas"]
        mean = stored_mean.float().lerp_(grad, 1 - beta1)
        square = stored_square.float().mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        stored_mean.copy_(mean)
        stored_square.copy_(square)
        values.mul_(1 - group["lr"] * group["weight_decay"])
        scale = square.sqrt_().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
        values.addcdiv_(mean, scale, value=-group["lr"] / (1 - beta1**step))


def new_moments(parameter: torch.Tensor, dtype: torch.dtype, step_device: torch.device) -> dict[str, torch.Tensor]:
    """A parameter's state before the first step. A count that the host reads stays in its memory."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=step_device),
        "exp_avg": torch.zeros_like(parameter, dtype=dtype),
        "exp_avg_sq": torch.zeros_like(parameter, dtype=dtype),
    }
