"""The naive definition of a MoE layer, and what the ranks of test_dispatch do with it: rows really travel."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hpcmoe.models.dispatch import RowLayout, run_experts
from hpcmoe.models.experts import Experts, Kernel

WORLD, EXPERTS, TOP_K, HIDDEN, WIDTH = 4, 8, 3, 4, 8
# tokens on each rank: a usual case, single tokens, a rank with many
TOKENS = ((5, 5, 5, 5), (1, 1, 1, 1), (1, 7, 2, 12))
# the experts that may be chosen: all; few, so that whole ranks get no row; all tokens to the same
CHOICES = (range(EXPERTS), range(4), range(TOP_K))


def by_token(x: torch.Tensor, chosen: torch.Tensor, weight: torch.Tensor, experts: Experts) -> torch.Tensor:
    """The definition: each token through each of its experts, one at a time."""
    rows = []
    for token in range(len(x)):
        total = torch.zeros_like(x[token])
        for k, expert in enumerate(chosen[token].tolist()):
            inner = F.silu(experts.w1_EFD[expert] @ x[token]) * (experts.w3_EFD[expert] @ x[token])
            total = total + weight[token, k] * (experts.w2_EDF[expert] @ inner)
        rows.append(total)
    return torch.stack(rows)


def every_ep_equals_a_loop_over_tokens() -> None:
    for ep in (1, 2, 4):
        groups = [dist.new_group(list(range(first, first + ep))) for first in range(0, WORLD, ep)]
        group = groups[dist.get_rank() // ep]
        kernels: tuple[Kernel, ...] = ("grouped_mm", "padded_bmm", "loop")
        for seed, (tokens, choices) in enumerate((tokens, choices) for tokens in TOKENS for choices in CHOICES):
            _case(ep, group if ep > 1 else None, tokens, choices, kernels[seed % 3], seed)


def _case(ep: int, group: dist.ProcessGroup | None, tokens: tuple[int, ...], choices: range, kernel: Kernel, seed: int) -> None:
    """Each rank makes all ranks' tokens and weights from the seed, and checks its own outputs and gradients."""
    generator = torch.Generator().manual_seed(seed)
    experts = Experts(EXPERTS, HIDDEN, WIDTH)
    for weight in experts.parameters():
        nn.init.normal_(weight, generator=generator)
    x = [torch.randn(count, HIDDEN, generator=generator) for count in tokens]
    weights = [torch.rand(count, TOP_K, generator=generator) for count in tokens]
    probe = [torch.randn(count, HIDDEN, generator=generator) for count in tokens]
    chosen = [torch.rand(count, len(choices), generator=generator).argsort(-1)[:, :TOP_K] + choices[0] for count in tokens]
    rank, where = dist.get_rank(), f"ep={ep} {tokens} {choices} {kernel}"

    mine = rank % ep * (EXPERTS // ep)
    local = Experts(EXPERTS // ep, HIDDEN, WIDTH)
    with torch.no_grad():
        for part, full in zip(local.parameters(), experts.parameters(), strict=True):
            part.copy_(full[mine : mine + EXPERTS // ep])

    def compute(rows_PD: torch.Tensor, rows: RowLayout) -> torch.Tensor:
        return local(rows_PD, rows, kernel)

    own_x, own_weights = x[rank].clone().requires_grad_(), weights[rank].clone().requires_grad_()
    counts = torch.bincount(chosen[rank].flatten(), minlength=EXPERTS)
    assert counts.sum() == tokens[rank] * TOP_K
    out = run_experts(own_x, chosen[rank], own_weights, counts, compute, 4, kernel == "padded_bmm", group)
    grads = torch.autograd.grad((out * probe[rank]).sum(), [own_x, own_weights, *local.parameters()])

    first = rank // ep * ep  # the ranks whose tokens meet in this group's experts
    naive_x = torch.cat(x[first : first + ep]).requires_grad_()
    naive_weights = torch.cat(weights[first : first + ep]).requires_grad_()
    wanted = by_token(naive_x, torch.cat(chosen[first : first + ep]), naive_weights, experts)
    scored = (wanted * torch.cat(probe[first : first + ep])).sum()
    naive = torch.autograd.grad(scored, [naive_x, naive_weights, *experts.parameters()])
    begin = sum(tokens[first:rank])
    window = slice(begin, begin + tokens[rank])
    pairs = [(out, wanted[window]), (grads[0], naive[0][window]), (grads[1], naive[1][window])]
    pairs += [(ours, whole[mine : mine + EXPERTS // ep]) for ours, whole in zip(grads[2:], naive[2:], strict=True)]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, msg=lambda text: f"{where}: {text}")
