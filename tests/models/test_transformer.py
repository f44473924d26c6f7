"""The whole model: causal, deterministic from its names, and honest about what it cannot build."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hpcmoe.config.model_schema import MlaConfig, ModelConfig
from hpcmoe.engine.parallelize import initial_values
from hpcmoe.errors import UserError
from hpcmoe.models.attention import Attention, rope_tables, rotate
from hpcmoe.models.support import check_model
from hpcmoe.models.transformer import Transformer


def model(**values: Any) -> ModelConfig:
    small: dict[str, Any] = {
        "name": "m",
        "vocab_size": 64,
        "hidden": 16,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 4,
        "experts": 4,
        "top_k": 2,
        "expert_ffn": 8,
    }
    return ModelConfig(**(small | values))


def test_a_later_token_never_changes_an_earlier_logit() -> None:
    net = initial_values(model(), seed=0)
    tokens = torch.randint(0, 64, (1, 12), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 64
    before, after = net(tokens), net(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7], after[:, 7])


def test_grouped_queries_share_keys_as_written_out_attention_does() -> None:
    config = model(qk_norm=True)
    attention = Attention(config)
    x = torch.randn(2, 6, 16)
    cos, sin = rope_tables(6, 4, config.rope_theta, x.device)
    q = attention.wq(x).view(2, 6, 4, 4).transpose(1, 2)
    k = attention.wk(x).view(2, 6, 2, 4).transpose(1, 2)
    v = attention.wv(x).view(2, 6, 2, 4).transpose(1, 2).repeat_interleave(2, 1)
    q, k = F.rms_norm(q, (4,), eps=config.norm_eps), F.rms_norm(k, (4,), eps=config.norm_eps)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin).repeat_interleave(2, 1)
    scores = (q @ k.transpose(-1, -2) / 2.0).masked_fill(~torch.ones(6, 6).tril().bool(), float("-inf"))
    wanted = attention.wo((scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 6, 16))
    torch.testing.assert_close(attention(x, cos, sin), wanted, rtol=1e-5, atol=1e-6)


def test_rotary_scores_depend_on_distance_only() -> None:
    cos, sin = rope_tables(10, 8, 10000.0, torch.device("cpu"))
    q, k = torch.randn(8), torch.randn(8)

    def score(i: int, j: int) -> float:
        return (rotate(q, cos[i], sin[i]) @ rotate(k, cos[j], sin[j])).item()

    assert score(5, 2) == pytest.approx(score(9, 6), rel=1e-4)


def test_the_balancing_losses_reach_the_router_without_touching_the_output() -> None:
    quiet, loud = initial_values(model(), 0), initial_values(model(aux_loss_coef=0.5, z_loss_coef=0.1), 0)
    tokens = torch.arange(24).view(2, 12)
    for net in (quiet, loud):
        net.loss_weight = 0.25
    outputs = [net(tokens) for net in (quiet, loud)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().mean().backward()
    (one,), (other,) = ([moe.router.weight.grad for moe in net.moe_layers().values()][-1:] for net in (quiet, loud))
    assert one is not None
    assert other is not None
    assert not torch.allclose(one, other)


def test_loads_count_every_assignment_of_every_layer_once() -> None:
    net = initial_values(model(first_dense_layers=1, ffn=16, layers=3), 0)
    net(torch.arange(20).view(2, 10))
    net(torch.arange(20).view(2, 10))
    loads = net.drain_loads()
    assert loads.keys() == {1, 2}
    assert all([int(load.counts_E.sum()) for load in layer] == [40, 40] for layer in loads.values())
    assert net.drain_loads() == {}
    net.eval()
    net(torch.arange(20).view(2, 10))
    assert net.drain_loads() == {}


def test_initial_values_come_from_the_seed_and_each_parameters_name() -> None:
    first, again, other = (initial_values(model(), seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])
    experts = first["layers.0.moe.experts.w1_EFD"]
    assert not torch.equal(experts[0], experts[1])
    assert not torch.equal(experts, first["layers.1.moe.experts.w1_EFD"])
    assert torch.equal(first["layers.0.ffn_norm.weight"], torch.ones(16))


def test_tied_embeddings_have_no_head_and_train_one_table() -> None:
    net = initial_values(model(tied_embeddings=True), 0)
    assert net.head is None
    assert net.embed is not None
    net(torch.arange(8).view(1, 8)).square().mean().backward()
    assert net.embed.weight.grad is not None
    assert (net.embed.weight.grad.abs().sum(1) > 0).all(), "every row is an output, though few are inputs"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mla": MlaConfig(8, None, 4, 4, 4)}, "the engine has no model.mla"),
        ({"sinks": True, "window": 128}, "no model.window, model.sinks"),
        ({"score": "sofmax"}, "did you mean 'softmax'"),
        ({"top_k": 5}, "model.top_k=5 is more than the 4 experts"),
        ({"first_dense_layers": 1}, "needs model.ffn"),
        ({"kv_heads": 3}, "multiple of model.kv_heads=3"),
        ({"groups": 4, "top_groups": 1}, "more than the 1 experts"),
        ({"shared_gate": True}, "needs shared experts"),
    ],
)
def test_a_shape_that_cannot_be_built_is_one_clear_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        check_model(model(**changes))
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError):
        Transformer(model(**changes))
