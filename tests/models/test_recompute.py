"""A second pass changes memory and time, and nothing else: not a bit of a gradient, not a route, not a count."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hpcmoe.config.model_schema import ModelConfig
from hpcmoe.engine.parallelize import initial_values
from hpcmoe.models import router
from hpcmoe.models.experts import Kernel
from hpcmoe.models.live_bytes import LiveBytes
from hpcmoe.models.recompute import mode_of_layer
from hpcmoe.models.transformer import Transformer
from tests.engine.ranks import run_together, write_text
from tests.models import recompute_cases

MODES = ("selective", "layer", "full")
TOKENS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))


def model(**values: Any) -> ModelConfig:
    """A dense layer, shared experts behind a gate, groups, both balancing losses, all biases."""
    small: dict[str, Any] = {
        "name": "m",
        "vocab_size": 64,
        "hidden": 16,
        "layers": 3,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 4,
        "qk_norm": True,
        "attention_bias": True,
        "attention_out_bias": True,
        "ffn": 24,
        "first_dense_layers": 1,
        "experts": 8,
        "top_k": 2,
        "expert_ffn": 16,
        "shared_experts": 1,
        "shared_gate": True,
        "router_bias": True,
        "score": "sigmoid",
        "groups": 4,
        "top_groups": 2,
        "aux_loss_coef": 0.1,
        "z_loss_coef": 0.01,
    }
    return ModelConfig(**(small | values))


def awkward(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Transformer:
    """All scores of layer 1 tie; in layer 2 one expert gets no token."""
    net = initial_values(config, 0).to(dtype)
    routers = {layer: moe.router for layer, moe in net.moe_layers().items()}
    with torch.no_grad():
        routers[1].weight.zero_()
        balance = routers[2].balance_E
        assert balance is not None
        balance[3] = -10.0
    return net


def step(net: Transformer) -> tuple[torch.Tensor, list[torch.Tensor], dict[int, torch.Tensor]]:
    """(loss, gradients, counts by layer)."""
    net.zero_grad()
    logits = net(TOKENS)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), TOKENS.flatten())
    loss.backward()
    counts = {layer: torch.stack([load.counts_E for load in loads]) for layer, loads in net.drain_loads().items()}
    return loss.detach(), [p.grad.clone() for p in net.parameters() if p.grad is not None], counts


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dtype", "kernel"), [("float32", "grouped_mm"), ("float32", "padded_bmm"), ("bfloat16", "loop")])
def test_every_gradient_is_bitwise_the_same(mode: str, dtype: str, kernel: Kernel) -> None:
    net = awkward(model(), getattr(torch, dtype))
    for moe in net.moe_layers().values():
        moe.kernel = kernel
    loss, wanted, counts = step(net)
    assert int(counts[2][0, 3]) == 0, "the case must have an expert without tokens"
    net.set_recompute(mode)
    again, found, recounted = step(net)
    assert torch.equal(again, loss)
    assert len(found) == len(wanted) == len(list(net.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert recounted.keys() == counts.keys()
    assert all(torch.equal(recounted[layer], counts[layer]) for layer in counts), "counted once, not once a pass"


@pytest.mark.parametrize("mode", MODES)
def test_a_token_is_routed_once_however_the_ties_would_fall_the_second_time(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice that differs at every call stands for ties that fall differently; a second one would change the gradients."""
    calls = 0

    def fickle(scores_TE: torch.Tensor, bias_E: torch.Tensor | None, config: ModelConfig) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return (torch.arange(config.top_k) + calls % 5).expand(len(scores_TE), -1)

    net = awkward(model())
    monkeypatch.setattr(router, "choose", fickle)
    _, wanted, _ = step(net)
    assert calls == 2
    calls = 0
    net.set_recompute(mode)
    _, found, _ = step(net)
    assert calls == 2, "two MoE layers"
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_two_microbatches_in_flight_do_not_mix() -> None:
    net = awkward(model())
    other = TOKENS.flip(1)

    def both() -> list[torch.Tensor]:
        net.zero_grad()
        first, second = net(TOKENS), net(other)  # as a pipeline does: two forward passes, then two backward passes
        first.square().mean().backward()
        second.square().mean().backward()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    wanted = both()
    net.set_recompute("selective")
    assert all(torch.equal(a, b) for a, b in zip(both(), wanted, strict=True))


def kept_bytes(config: ModelConfig, recompute: str) -> int:
    """Bytes alive after the forward pass, the logits with them."""
    net = initial_values(config, 0)
    net.set_recompute(recompute)
    with LiveBytes() as live:
        logits = net(TOKENS)
        bytes_kept = live.now()
    del logits
    return bytes_kept


def test_what_is_kept_grows_from_full_over_layer_and_selective_to_none() -> None:
    config = model(layers=5)
    full, layer, selective, none = (kept_bytes(config, recompute) for recompute in ("full", "layer", "selective", "none"))
    assert full < layer < none
    assert full < selective < 0.6 * none, "selective saves 40 % and more of what is kept without it"


def test_full_keeps_a_blocks_input_and_its_routing() -> None:
    """The growth from three to five layers is two blocks': the input, and integers of the routing."""
    growth = kept_bytes(model(layers=5), "full") - kept_bytes(model(layers=3), "full")
    tokens, hidden, top_k = TOKENS.numel(), 16, 2
    routing = tokens * top_k * 8 * 2  # chosen experts and places, int64
    small = 2000  # counts, row ends, losses
    assert 2 * tokens * hidden * 4 <= growth <= 2 * (tokens * hidden * 4 + routing + small)


@pytest.mark.parametrize("mode", ["none", *MODES])
def test_memory_does_not_grow_over_steps_even_without_a_garbage_collector(mode: str) -> None:
    net = awkward(model())
    net.set_recompute(mode)
    gc.collect()
    gc.disable()
    try:
        with LiveBytes() as live:
            left = []
            for _ in range(4):
                net(TOKENS).square().mean().backward()
                net.drain_loads()
                net.zero_grad()
                left.append(live.now())
    finally:
        gc.enable()
    assert left[1] == left[2] == left[3]


def test_nothing_is_kept_where_no_gradient_is_wanted() -> None:
    net = awkward(model())
    with torch.no_grad():
        plain = net(TOKENS)
        net.set_recompute("selective")
        assert torch.equal(net(TOKENS), plain)


def test_parameter_names_do_not_change() -> None:
    net, plain = initial_values(model(), 0), initial_values(model(), 0)
    net.set_recompute("full")
    assert net.state_dict().keys() == plain.state_dict().keys()


def test_layer_repeats_every_second_block() -> None:
    assert [mode_of_layer("layer", layer) for layer in range(4)] == ["full", "none", "full", "none"]
    assert mode_of_layer("selective", 1) == "selective"
    with pytest.raises(ValueError, match="no recompute mode"):
        mode_of_layer("sometimes", 0)


@pytest.mark.multiprocess
def test_ranks_get_the_same_gradients_and_repeat_no_collective_that_is_kept(tmp_path: Path) -> None:
    run_together(4, tmp_path, recompute_cases.every_mode_equals_none, write_text(tmp_path / "text"))
