"""Turns parts of the model into this rank's share of them: tensor parallelism, experts over ep, FSDP2 over the rest; then values.

``parallelize`` reads as the order of operations. Gradients come out as plain sums over data ranks: the loss is already divided by
the step's token count.
"""

from __future__ import annotations

import hashlib
import itertools
import warnings
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hpcmoe.config.model_schema import ModelConfig
from hpcmoe.config.schema import Precision, PrecisionConfig
from hpcmoe.engine.mesh import Meshes
from hpcmoe.engine.stages import Stages
from hpcmoe.models.attention import Attention
from hpcmoe.models.experts import Experts
from hpcmoe.models.moe import MoE, SwiGLU
from hpcmoe.models.tensor_parallel import TensorParallel
from hpcmoe.models.transformer import Transformer, init_std

# Which dimension tp splits, by a parameter's last two names. All ranks hold the others (norms, routers, gates) whole.
SPLIT_ROWS = ("wq.weight", "wk.weight", "wv.weight", "wq.bias", "wk.bias", "wv.bias", "w1.weight", "w3.weight")
SPLIT_COLUMNS = ("wo.weight", "w2.weight")
SPLIT_VOCABULARY = ("embed.weight", "head.weight")


def parallelize(stages: Stages, meshes: Meshes, precision: PrecisionConfig) -> None:
    """In place. The parts may be on the meta device; fill them with ``init_weights`` or from a checkpoint afterwards."""
    for part in stages.parts:
        split_over_tp(part, meshes.dense["tp"])
        for moe in part.moe_layers().values():
            split_over_ep(moe, meshes.experts["ep"])
        shard(part, meshes, precision, keep_gathered=stages.count > 1)
        prefetch(part)


def split_over_tp(part: Transformer, tp: DeviceMesh) -> None:
    """Every parameter but the experts becomes a DTensor over tp, split or whole. Experts are spread over ep, tp ranks too."""
    if tp.size() == 1:
        return
    handle = TensorParallel(tp.get_group())
    for module_name, module in part.named_modules():
        if isinstance(module, Experts):
            continue
        if isinstance(module, Transformer | Attention | SwiGLU | MoE):
            module.tp = handle
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement = tp_placement(f"{module_name}.{name}")
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), tp, [placement], src_data_rank=None)))


def tp_placement(name: str) -> Placement:
    """How tp holds the parameter of this name."""
    leaf = ".".join(name.split(".")[-2:])
    if leaf in SPLIT_ROWS or leaf in SPLIT_VOCABULARY:
        return Shard(0)
    return Shard(1) if leaf in SPLIT_COLUMNS else Replicate()


def split_over_ep(moe: MoE, ep: DeviceMesh) -> None:
    """Each ep rank keeps consecutive experts. As DTensors they keep their global numbers, in checkpoints too."""
    if ep.size() == 1:
        return
    moe.ep_group = ep.get_group()
    for name, weight in list(moe.experts.named_parameters(recurse=False)):
        setattr(moe.experts, name, nn.Parameter(distribute_tensor(weight.detach(), ep, [Shard(0)], src_data_rank=None)))


def shard(part: Transformer, meshes: Meshes, precision: PrecisionConfig, keep_gathered: bool) -> None:
    """FSDP2 over experts, blocks, and what is left. ``keep_gathered``: from the first microbatch to the last, for pipelines."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision.name is Precision.bf16 else None,
        reduce_dtype=torch.bfloat16 if precision.reduce == "bf16" else torch.float32,
        cast_forward_inputs=False,  # rotary tables and router inputs choose their own dtype
    )
    # the padded kernel gives a view, which nobody writes into
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(FSDPExperts\) returned a view")
    wrap = partial(fully_shard, mp_policy=policy, reshard_after_forward=not keep_gathered)
    dense = partial(_dense_dim, ranks=meshes.dense["dp_shard"].size())
    for block in part.layers.values():
        if isinstance(block.moe, MoE):
            experts = block.moe.experts
            place = partial(_fixed_dim, dim=expert_shard_dim(experts, meshes))
            wrap(experts, mesh=meshes.expert_data(), shard_placement_fn=place)
        wrap(block, mesh=meshes.data(), shard_placement_fn=dense)
    wrap(part, mesh=meshes.data(), shard_placement_fn=dense)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum


def prefetch(part: Transformer) -> None:
    """Each block gathers the next one's weights while it computes: routing waits for the GPU, so FSDP's own order is late."""
    groups = [[block] + ([block.moe.experts] if isinstance(block.moe, MoE) else []) for block in part.layers.values()]
    for here, following in itertools.pairwise(groups):
        _fsdp(here[0]).set_modules_to_forward_prefetch([_fsdp(module) for module in following])
        _fsdp(following[0]).set_modules_to_backward_prefetch([_fsdp(module) for module in reversed(here)])


def _fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def _fixed_dim(parameter: nn.Parameter, dim: int) -> Shard:
    return Shard(dim)


def _dense_dim(parameter: nn.Parameter, ranks: int) -> Shard | None:
    """Rows, as FSDP does by itself; columns where tp has split the rows and what is left does not divide evenly."""
    if isinstance(parameter, DTensor) and parameter.placements[0] == Shard(0) and parameter.to_local().shape[0] % ranks:
        return Shard(1) if parameter.dim() > 1 and parameter.shape[1] % ranks == 0 else None
    return None


def expert_shard_dim(experts: Experts, meshes: Meshes) -> int:
    """Shard whole experts over efsdp where they divide evenly, else their rows, which always do more evenly."""
    ranks = meshes.experts["efsdp"].size()
    local = experts.w1_EFD.shape[0] // meshes.experts["ep"].size()
    rows = (experts.w1_EFD.shape[1], experts.w2_EDF.shape[1])
    return 1 if local % ranks and not any(size % ranks for size in rows) else 0


def materialize(stages: Stages, device: torch.device, seed: int) -> None:
    """Give meta-device parts memory and initial values."""
    for part in stages.parts:
        part.to_empty(device=device)
    init_weights(stages, seed)


def init_weights(stages: Stages, seed: int) -> None:
    """Fill parameters and buffers where they are. Values depend on seed, name and global index only, never on the layout."""
    for part in stages.parts:
        _fill(part, seed)


@torch.no_grad()
def _fill(part: Transformer, seed: int) -> None:
    for name, parameter in part.named_parameters():
        local, start = _local_part(parameter)
        std = init_std(name, part.model)
        if std is None or std == 0.0:
            local.fill_(1.0 if std is None else 0.0)
        elif parameter.dim() == 3:
            for i in range(local.shape[0]):
                _draw(local[i], parameter.shape[1:], start[1:], std, seed, f"{name}/{start[0] + i}")
        else:
            _draw(local, parameter.shape, start, std, seed, name)
    for buffer in part.buffers():
        buffer.zero_()


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
    _fill(whole, seed)
    return whole
