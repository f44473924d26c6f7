"""Which experts a token goes to, and with what weight. Shapes: T tokens, D hidden, E experts, K chosen experts, Q groups.

The semantics of each model family are tables in tests/models/test_router.py. Not for moving tokens (hpcmoe.models.dispatch).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from hpcmoe.config.model_schema import ModelConfig
from hpcmoe.models.recompute import decided
from hpcmoe.models.tensor_parallel import ALONE, TensorParallel, local

NEG_INF = float("-inf")


class Routing(NamedTuple):
    experts_TK: torch.Tensor  # int64
    weights_TK: torch.Tensor  # fp32
    logits_TE: torch.Tensor  # fp32
    probs_TE: torch.Tensor  # fp32, sums to 1 over experts; what the balance loss sees


def limit_to_groups(choice_TE: torch.Tensor, groups: int, top_groups: int, top2: bool) -> torch.Tensor:
    """Scores outside each token's best groups become -inf. Group score: sum of its two best (DeepSeek-V3) or its best (V2)."""
    by_group_TQe = choice_TE.unflatten(-1, (groups, -1))
    best = min(2, by_group_TQe.shape[-1]) if top2 else 1
    score_TQ = by_group_TQe.topk(best, dim=-1).values.sum(-1)
    kept_TQ = torch.zeros_like(score_TQ, dtype=torch.bool).scatter_(-1, score_TQ.topk(top_groups, dim=-1).indices, True)
    return by_group_TQe.masked_fill(~kept_TQ.unsqueeze(-1), NEG_INF).flatten(-2)


@torch.no_grad()
def choose(scores_TE: torch.Tensor, bias_E: torch.Tensor | None, model: ModelConfig) -> torch.Tensor:
    """The experts of each token, int64 [T, K], by score + bias within its best groups."""
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if model.groups > 1:
        choice_TE = limit_to_groups(choice_TE, model.groups, model.top_groups, top2=model.score == "sigmoid")
    return choice_TE.topk(model.top_k, dim=-1).indices


def route(logits_TE: torch.Tensor, bias_E: torch.Tensor | None, model: ModelConfig) -> Routing:
    """Choose by score + bias, weigh by the score alone (aux-loss-free balancing, Wang et al. 2024)."""
    if model.score == "sigmoid":
        scores_TE = logits_TE.sigmoid()
        probs_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
    else:
        probs_TE = logits_TE.softmax(-1)
        scores_TE = logits_TE if model.score == "topk_softmax" else probs_TE
    experts_TK = decided(lambda: choose(scores_TE, bias_E, model))
    weights_TK = scores_TE.gather(-1, experts_TK)
    if model.score == "topk_softmax":
        weights_TK = weights_TK.softmax(-1)
    elif model.norm_topk:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return Routing(experts_TK, weights_TK * model.route_scale, logits_TE, probs_TE)


def balance_loss(probs_TE: torch.Tensor, counts_E: torch.Tensor, top_k: int, tp: TensorParallel = ALONE) -> torch.Tensor:
    """E * sum_e(share of assignments x mean probability), Megatron's normalisation: 1 when balanced, for any top_k.

    Over the tokens of all ``tp`` ranks, which together hold the microbatch; all of them return the same.
    """
    tokens, experts = probs_TE.shape[0] * tp.size, probs_TE.shape[1]
    sums = tp.sum(torch.stack((probs_TE.sum(0), counts_E.to(probs_TE.dtype))))
    return experts * (sums[1] / (tokens * top_k) * (sums[0] / tokens)).sum()


def z_loss(logits_TE: torch.Tensor) -> torch.Tensor:
    """mean(logsumexp^2): keeps router logits small (Zoph et al. 2022)."""
    return logits_TE.logsumexp(-1).square().mean()


class Router(nn.Module):
    """Linear scores in fp32 and the state of aux-loss-free balancing (a persistent buffer, the same on every rank)."""

    balance_E: torch.Tensor | None

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.model = model
        self.weight = nn.Parameter(torch.empty(model.experts, model.hidden))
        self.bias = nn.Parameter(torch.zeros(model.experts)) if model.router_bias else None
        self.register_buffer("balance_E", torch.zeros(model.experts) if model.aux_free_bias else None)

    def forward(self, x_TD: torch.Tensor) -> Routing:
        bias = None if self.bias is None else local(self.bias).float()
        return route(F.linear(x_TD.float(), local(self.weight).float(), bias), self.balance_E, self.model)

    @torch.no_grad()
    def update_balance(self, counts_E: torch.Tensor) -> None:
        """b += u * sign(mean(c) - c), once an optimizer step. ``counts_E``: the step's assignments over all data ranks."""
        if self.balance_E is not None:
            counts = counts_E.to(dtype=torch.float64)
            step = (counts.mean() - counts).sign().to(self.balance_E)
            self.balance_E.add_(step, alpha=self.model.bias_update_rate)
