"""Turns the model of one process into this rank's part of it: experts over ep, then everything over FSDP2; then initial values.

Reads as the order of operations. Gradients come out as plain sums over data ranks: the loss is already divided by the
step's token count.
"""

from __future__ import annotations

import hashlib
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hpcmoe.config.model_schema import ModelConfig
from hpcmoe.config.schema import Precision, PrecisionConfig
from hpcmoe.engine.mesh import Meshes
from hpcmoe.models.experts import Experts
from hpcmoe.models.transformer import Transformer, init_std


def parallelize(model: Transformer, meshes: Meshes, precision: PrecisionConfig) -> None:
    """In place. ``model`` may be on the meta device; fill it with ``init_weights`` or from a checkpoint afterwards."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision.name is Precision.bf16 else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # rotary tables and router inputs choose their own dtype
    )
    for moe in model.moe_layers().values():
        if meshes.experts["ep"].size() > 1:
            split_experts(moe.experts, meshes.experts["ep"])
            moe.ep_group = meshes.experts["ep"].get_group()
        place = partial(_place, dim=expert_shard_dim(moe.experts, meshes))
        fully_shard(moe.experts, mesh=meshes.expert_data(), mp_policy=policy, shard_placement_fn=place)
    for block in model.layers.values():
        fully_shard(block, mesh=meshes.data(), mp_policy=policy)
    fully_shard(model, mesh=meshes.data(), mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum


def split_experts(experts: Experts, ep: DeviceMesh) -> None:
    """Each ep rank keeps consecutive experts. As DTensors they keep their global numbers, in checkpoints too."""
    for name, weight in list(experts.named_parameters(recurse=False)):
        setattr(experts, name, nn.Parameter(distribute_tensor(weight.detach(), ep, [Shard(0)], src_data_rank=None)))


def _place(parameter: nn.Parameter, dim: int) -> Shard:
    return Shard(dim)


def expert_shard_dim(experts: Experts, meshes: Meshes) -> int:
    """Shard whole experts over efsdp where they divide evenly, else their rows, which always do more evenly."""
    ranks = meshes.experts["efsdp"].size()
    local = experts.w1_EFD.shape[0] // meshes.experts["ep"].size()
    rows = (experts.w1_EFD.shape[1], experts.w2_EDF.shape[1])
    return 1 if local % ranks and not any(size % ranks for size in rows) else 0


@torch.no_grad()
def init_weights(model: Transformer, device: torch.device, seed: int) -> None:
    """Fill every parameter and buffer on ``device``. Values depend on seed, name and global index only, never on the layout."""
    for name, parameter in model.named_parameters():
        local, start = _local_part(parameter)
        std = init_std(name, model.model)
        if std is None or std == 0.0:
            local.fill_(1.0 if std is None else 0.0)
        elif parameter.dim() == 3:
            for i in range(local.shape[0]):
                _draw(local[i], parameter.shape[1:], start[1:], std, seed, f"{name}/{start[0] + i}")
        else:
            _draw(local, parameter.shape, start, std, seed, name)
    for buffer in model.buffers():
        buffer.zero_()


def materialize(model: Transformer, device: torch.device) -> None:
    """Give a meta-device model memory, uninitialised."""
    model.to_empty(device=device)


def _local_part(parameter: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    if not isinstance(parameter, DTensor):
        return parameter, (0,) * parameter.dim()
    _, start = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), start


def _draw(out: torch.Tensor, shape: torch.Size, start: tuple[int, ...], std: float, seed: int, name: str) -> None:
    """Draw the whole matrix and keep this rank's window of it."""
    if out.numel() == 0:
        return
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator(device=out.device).manual_seed(int.from_bytes(digest, "little") >> 1)
    full = torch.empty(shape, device=out.device).normal_(0.0, std, generator=generator)
    window = tuple(slice(first, first + size) for first, size in zip(start, out.shape, strict=True))
    out.copy_(full[window])


def initial_values(model: ModelConfig, seed: int) -> Transformer:
    """The whole model in one process on CPU, with the values every layout starts from."""
    whole = Transformer(model)
    init_weights(whole, torch.device("cpu"), seed)
    return whole
