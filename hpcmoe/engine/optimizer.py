"""AdamW over parameters that live on different meshes, and the gradient norm over all of them.

The norm needs no collective of its own: each rank's share rides in the step's one reduction (hpcmoe.engine.agreement).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpcmoe.config.schema import OptimConfig
from hpcmoe.engine.bf16_moments import AdamWBf16Moments, new_moments


def build_optimizer(parameters: Iterable[nn.Parameter], optim: OptimConfig, moments: str = "fp32") -> torch.optim.Optimizer:
    """``moments``: the dtype they are stored in, fp32 or bf16.

    Groups by mesh (a fused step takes one mesh) and by decay: norms and biases, the one-dimensional ones, do not decay.
    """
    groups: dict[tuple[object, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((mesh, parameter.dim() > 1), []).append(parameter)
    params = [{"params": group, "weight_decay": optim.weight_decay if decays else 0.0} for (_, decays), group in groups.items()]
    betas = (optim.betas[0], optim.betas[1])
    if moments == "bf16":
        return AdamWBf16Moments(params, optim.lr, betas, optim.eps)
    return torch.optim.AdamW(params, lr=optim.lr, betas=betas, eps=optim.eps, fused=True)


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
            grad = parameter.grad
            pairs.append((parameter, grad.to_local() if isinstance(grad, DTensor) else grad))
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
