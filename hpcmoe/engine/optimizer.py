"""AdamW over parameters that live on different meshes, and the gradient norm over all of them.

The norm needs no collective of its own: each rank's share rides in the step's one reduction (hpcmoe.engine.agreement).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from hpcmoe.config.schema import OptimConfig
from hpcmoe.engine.bf16_moments import AdamWBf16Moments, local, new_moments


def build_optimizer(parameters: Iterable[nn.Parameter], optim: OptimConfig, moments: str = "fp32") -> torch.optim.Optimizer:
    """``moments``: the dtype they are stored in, fp32 or bf16. Norms and biases, the one-dimensional parameters, do not decay."""
    groups: dict[bool, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.dim() > 1, []).append(parameter)
    params = [{"params": group, "weight_decay": optim.weight_decay if decays else 0.0} for decays, group in groups.items()]
    betas = (optim.betas[0], optim.betas[1])
    if moments == "bf16":
        return AdamWBf16Moments(params, optim.lr, betas, optim.eps)
    return AdamWOfParts(params, lr=optim.lr, betas=betas, eps=optim.eps, fused=True)


class AdamWOfParts(torch.optim.AdamW):
    """torch.optim.AdamW, fused, on each rank's own parts of parameters that lie on any meshes. Its state is sharded as they are.

    An update is element by element, so that the parts are all it needs; through DTensor each step would be dispatched
    parameter by parameter in Python, which takes longer than the update of a small part.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            held = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in held:
                if not self.state[parameter]:
                    self.state[parameter] = new_moments(parameter, torch.float32, parameter.device)
            states = [self.state[parameter] for parameter in held]
            adamw(
                [local(parameter) for parameter in held],
                [local(parameter.grad) for parameter in held],
                [local(state["exp_avg"]) for state in states],
                [local(state["exp_avg_sq"]) for state in states],
                [],
                [local(state["step"]) for state in states],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


@torch.no_grad()
def named_moments(
    parameters: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, torch.Tensor]]:
    """The optimizer's live state by parameter name, zeros before the first step. Rates and decay are the config's.

    One flat table for all meshes: dense and expert moments cannot be mixed up, and any layout can read another's.
    """
    moments = {}
    in_bf16 = isinstance(optimizer, AdamWBf16Moments)
    for name, parameter in parameters:
        if not optimizer.state[parameter]:
            optimizer.state[parameter] = new_moments(
                parameter,
                torch.bfloat16 if in_bf16 else torch.float32,
                torch.device("cpu") if in_bf16 else parameter.device,
            )
        moments[name] = dict(optimizer.state[parameter])
    return moments


def _local_gradients(parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Each parameter with this rank's part of its gradient."""
    pairs = []
    for parameter in parameters:
        if parameter.grad is not None:
            pairs.append((parameter, local(parameter.grad)))
    return pairs


def _counts_here(parameter: torch.Tensor) -> bool:
    """Whether this rank speaks for its part: of replicas only the first does."""
    assert isinstance(parameter, DTensor)
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(at == 0 or not placement.is_replicate() for at, placement in zip(coordinate, parameter.placements, strict=True))


@torch.no_grad()
def local_squared_norm(parameters: Iterable[nn.Parameter], device: torch.device) -> torch.Tensor:
    """This rank's share of the squared gradient norm, fp64 scalar; the sum over all ranks is the whole."""
    grads = [grad for parameter, grad in _local_gradients(parameters) if _counts_here(parameter) and grad.numel()]
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(grads)).double().square().sum()


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, limit: float) -> None:
    """Scale all gradients so that a global ``norm`` above ``limit`` becomes ``limit``; limit 0: never."""
    if limit > 0 and norm > limit:
        torch._foreach_mul_([grad for _, grad in _local_gradients(parameters) if grad.numel()], limit / (norm + 1e-6))
