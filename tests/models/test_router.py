"""The semantics of each model family's router, as tables small enough to check by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcmoe.config.model_schema import ModelConfig
from hpcmoe.models.router import Router, balance_loss, limit_to_groups, route, z_loss


def model(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "name": "table",
        "vocab_size": 272,
        "hidden": 8,
        "layers": 1,
        "heads": 1,
        "kv_heads": 1,
        "head_dim": 8,
        "experts": 4,
        "top_k": 2,
        "expert_ffn": 8,
    }
    return ModelConfig(**(values | changes))


def weights(logits: list[float], bias: list[float] | None = None, **changes: Any) -> dict[int, float]:
    """Expert -> weight for one token."""
    b = None if bias is None else torch.tensor(bias)
    routing = route(torch.tensor([logits]), b, model(experts=len(logits), **changes))
    return dict(zip(routing.experts_TK[0].tolist(), routing.weights_TK[0].tolist(), strict=True))


LOGITS = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().tolist()  # softmax gives these back


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("Mixtral: renormalised", {"score": "softmax", "norm_topk": True}, {3: 4 / 7, 2: 3 / 7}),
        ("Qwen2-MoE, OLMoE: as they are", {"score": "softmax", "norm_topk": False}, {3: 0.4, 2: 0.3}),
        ("GPT-OSS: softmax of the top logits", {"score": "topk_softmax", "norm_topk": False}, {3: 4 / 7, 2: 3 / 7}),
        (
            "DeepSeek-V2: scaled, not renormalised",
            {"score": "softmax", "norm_topk": False, "route_scale": 16.0},
            {3: 6.4, 2: 4.8},
        ),
    ],
)
def test_softmax_families_weigh_their_top_experts(family: str, changes: dict[str, Any], expected: dict[int, float]) -> None:
    assert weights(LOGITS, **changes) == pytest.approx(expected, rel=1e-6), family


def test_deepseek_v3_chooses_with_the_bias_and_weighs_without_it() -> None:
    # sigmoid scores 0.5, 0.6, 0.7, 0.8; the bias lifts expert 0 above all
    logits = [torch.tensor(p).logit().item() for p in (0.5, 0.6, 0.7, 0.8)]
    chosen = weights(logits, bias=[0.4, 0.0, 0.0, 0.0], score="sigmoid", route_scale=2.5)
    assert chosen == pytest.approx({0: 2.5 * 0.5 / 1.3, 3: 2.5 * 0.8 / 1.3}, rel=1e-5)


def test_the_bias_changes_the_choice_but_never_gets_a_gradient() -> None:
    logits = torch.tensor([LOGITS], requires_grad=True)
    bias = torch.tensor([1.0, 0.0, 0.0, 0.0], requires_grad=True)
    route(logits, bias, model()).weights_TK.sum().backward()
    assert logits.grad is not None
    assert bias.grad is None


def test_group_score_is_the_sum_of_two_for_v3_and_the_best_for_v2() -> None:
    # groups (0.9, 0.0) and (0.6, 0.5): the best one is in the first, the best two together in the second
    choice = torch.tensor([[0.9, 0.0, 0.6, 0.5]])
    assert limit_to_groups(choice, 2, 1, top2=True).tolist() == [[-torch.inf, -torch.inf, pytest.approx(0.6), 0.5]]
    assert limit_to_groups(choice, 2, 1, top2=False).tolist() == [[pytest.approx(0.9), 0.0, -torch.inf, -torch.inf]]


def test_masked_groups_stay_out_even_when_all_choice_scores_are_negative() -> None:
    # with zeros as the mask (not -inf) experts 0 and 1 of the masked group would win
    logits = [torch.tensor(p).logit().item() for p in (0.1, 0.1, 0.3, 0.4)]
    chosen = weights(logits, bias=[-1.0, -1.0, -1.0, -1.0], score="sigmoid", groups=2, top_groups=1)
    assert set(chosen) == {2, 3}


def test_scores_are_fp32_whatever_the_activations_are() -> None:
    router = Router(model()).to(torch.bfloat16)
    torch.nn.init.normal_(router.weight)
    routing = router(torch.randn(3, 8, dtype=torch.bfloat16))
    assert routing.weights_TK.dtype == routing.logits_TE.dtype == torch.float32


def test_the_balance_bias_moves_by_the_rate_towards_the_mean_load() -> None:
    router = Router(model(bias_update_rate=0.1))
    router.update_balance(torch.tensor([4, 0, 2, 2]))
    assert router.balance_E is not None
    assert router.balance_E.tolist() == pytest.approx([-0.1, 0.1, 0.0, 0.0])
    router.update_balance(torch.tensor([1000, 0, 0, 0]))
    assert router.balance_E.tolist() == pytest.approx([-0.2, 0.2, 0.1, 0.1])


def test_the_balance_bias_is_saved_and_is_no_parameter() -> None:
    router = Router(model())
    assert "balance_E" in router.state_dict()
    assert dict(router.named_parameters()).keys() == {"weight"}
    assert Router(model(aux_free_bias=False)).balance_E is None


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_the_balance_loss_is_one_when_balanced_and_experts_over_top_k_at_worst(top_k: int) -> None:
    even = torch.full((8, 4), 0.25)
    assert balance_loss(even, torch.full((4,), 2 * top_k), top_k).item() == pytest.approx(1.0)
    one = torch.zeros(8, 4)
    one[:, 0] = 1.0
    assert balance_loss(one, torch.tensor([8, 0, 0, 0]), 1).item() == pytest.approx(4.0)


def test_the_z_loss_is_the_mean_squared_logsumexp() -> None:
    logits = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    log2 = torch.tensor(2.0).log().item()
    assert z_loss(logits).item() == pytest.approx((log2**2 + (1 + log2) ** 2) / 2)


def by_hand(logits: list[float], bias: list[float], config: ModelConfig) -> tuple[list[float], list[float]]:
    """(choice scores, weights before choosing) of one token, written out in fp64."""
    values = torch.tensor(logits, dtype=torch.float64)
    if config.score == "sigmoid":
        scores = values.sigmoid()
    else:
        scores = values if config.score == "topk_softmax" else values.softmax(-1)
    choice = scores + torch.tensor(bias, dtype=torch.float64)
    if config.groups > 1:
        groups = choice.view(config.groups, -1)
        best = groups.topk(min(2, groups.shape[1]), -1).values if config.score == "sigmoid" else groups.amax(-1, keepdim=True)
        kept = best.sum(-1).topk(config.top_groups).indices
        choice = torch.full_like(groups, -torch.inf).index_copy(0, kept, groups[kept]).flatten()
    return choice.tolist(), scores.tolist()


@given(data=st.data(), score=st.sampled_from(["softmax", "sigmoid", "topk_softmax"]), groups=st.sampled_from([1, 2]))
@settings(max_examples=60, deadline=None)
def test_routing_equals_a_loop_over_tokens_ties_included(data: st.DataObject, score: str, groups: int) -> None:
    """Few possible logits, so that ties are common: then the choice is one of the best ones, whichever."""
    experts, tokens = 4, data.draw(st.integers(1, 4))
    top_groups = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, experts // groups * top_groups))
    number = st.sampled_from([-1.5, -0.25, 0.0, 0.25, 2.0])
    rows = data.draw(st.lists(st.lists(number, min_size=experts, max_size=experts), min_size=tokens, max_size=tokens))
    bias = data.draw(st.lists(st.sampled_from([-1.0, 0.0, 0.5]), min_size=experts, max_size=experts))
    norm = data.draw(st.booleans())
    config = model(score=score, groups=groups, top_groups=top_groups, top_k=top_k, norm_topk=norm, route_scale=1.5)
    routing = route(torch.tensor(rows), torch.tensor(bias), config)
    assert routing.experts_TK.shape == routing.weights_TK.shape == (tokens, top_k)
    for token, logits in enumerate(rows):
        choice, scores = by_hand(logits, bias, config)
        chosen = routing.experts_TK[token].tolist()
        assert len(set(chosen)) == top_k
        if groups == 1 or top_groups == groups:  # ties between groups may fall either way
            best = sorted(choice, reverse=True)[:top_k]
            assert sorted((choice[e] for e in chosen), reverse=True) == pytest.approx(best, abs=1e-6)
        picked = torch.tensor([scores[e] for e in chosen], dtype=torch.float64)
        if score == "topk_softmax":
            picked = picked.softmax(-1)
        elif norm:
            picked = picked / picked.sum()
        assert routing.weights_TK[token].tolist() == pytest.approx((1.5 * picked).tolist(), rel=1e-5)


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_a_token_stays_within_its_best_groups(seed: int) -> None:
    logits = torch.randn(6, 12, generator=torch.Generator().manual_seed(seed))
    config = model(experts=12, groups=4, top_groups=2, top_k=3, score="sigmoid")
    routing = route(logits, torch.zeros(12), config)
    for token in range(6):
        best = logits[token].sigmoid().view(4, 3).topk(2, -1).values.sum(-1).topk(2).indices.tolist()
        assert {expert // 3 for expert in routing.experts_TK[token].tolist()} <= set(best)
