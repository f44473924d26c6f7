"""The parts of the model that live on this rank: one, or several stages of a pipeline. Together they answer like one module.

Names carry global layer numbers, so the parts' names never collide and mean the same in every layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hpcmoe.config.model_schema import ModelConfig
from hpcmoe.engine.support import Sizes
from hpcmoe.models.moe import LayerLoad, MoE
from hpcmoe.models.partition import chunks, split, stages_of_rank
from hpcmoe.models.transformer import Part, Transformer


@dataclass(frozen=True)
class Stages:
    """``parts[i]`` is stage ``numbers[i]`` of ``count``."""

    parts: list[Transformer]
    numbers: list[int]
    count: int

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for part in self.parts:
            yield from part.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        for part in self.parts:
            yield from part.parameters()

    def modules(self) -> Iterator[nn.Module]:
        for part in self.parts:
            yield from part.modules()

    def state_dict(self) -> dict[str, Any]:
        """Parameters and persistent buffers by name: the live ones."""
        return {name: value for part in self.parts for name, value in part.state_dict().items()}

    def moe_layers(self) -> dict[int, MoE]:
        """The MoE layers that live here, by layer number."""
        return {layer: moe for part in self.parts for layer, moe in part.moe_layers().items()}

    def drain_loads(self) -> dict[int, list[LayerLoad]]:
        """The MoE layers' loads since the last call, which forgets them."""
        return {layer: loads for part in self.parts for layer, loads in part.drain_loads().items()}

    def train(self, mode: bool = True) -> None:
        for part in self.parts:
            part.train(mode)


def build_stages(model: ModelConfig, seq_len: int, sizes: Sizes, pp_rank: int) -> Stages:
    """Pipeline rank ``pp_rank``'s parts of the model, on the meta device."""
    if sizes.pp == 1:
        layers = split(model, seq_len, 1)
        numbers = [0]
    else:
        layers = split(model, seq_len, sizes.pp * chunks(sizes.schedule))
        numbers = stages_of_rank(sizes.schedule, sizes.pp, pp_rank)
    count = len(layers)
    with torch.device("meta"):
        parts = [Transformer(model, Part(layers[n], first=n == 0, last=n == count - 1)) for n in numbers]
    return Stages(parts, numbers, count)
