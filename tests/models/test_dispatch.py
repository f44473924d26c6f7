"""Dispatch is dropless and exact: permutation, padding and kernels give what a loop over tokens gives, gradients too."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcmoe.models.dispatch import block_places, gather_rows, layout_rows, run_experts, scatter_rows, sorted_places
from hpcmoe.models.experts import Experts, Kernel
from tests.engine.ranks import run_together
from tests.models import dispatch_cases
from tests.models.dispatch_cases import by_token

CPU = torch.device("cpu")


@st.composite
def routings(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Distinct experts for each token, among them experts without tokens and single tokens; and how many experts there are."""
    experts = draw(st.integers(1, 6))
    top_k = draw(st.integers(1, experts))
    tokens = draw(st.integers(1, 9))
    rows = [draw(st.permutations(range(experts)))[:top_k] for _ in range(tokens)]
    return torch.tensor(rows), experts


@given(routings())
@settings(max_examples=60, deadline=None)
def test_sorting_by_expert_is_a_stable_permutation(case: tuple[torch.Tensor, int]) -> None:
    flat = case[0].flatten()
    place = sorted_places(flat)
    assert sorted(place.tolist()) == list(range(len(flat)))
    moved = torch.empty_like(flat)
    moved[place] = flat
    assert moved.tolist() == sorted(flat.tolist())
    for expert in flat.unique():
        assert place[flat == expert].tolist() == sorted(place[flat == expert].tolist())


def test_places_of_two_sources_and_two_experts() -> None:
    # expert 0 has rows 0 | 3 4 5, expert 1 has rows 1 2; rows padded to 4: expert 1 starts at 4
    layout = layout_rows([4, 2], 4, False, CPU)
    assert (layout.starts, layout.sizes, layout.ends_E.tolist()) == ([0, 4], [4, 4], [4, 8])
    assert block_places([[1, 2], [3, 0]], layout, CPU).tolist() == [0, 4, 5, 1, 2, 3]


@given(st.lists(st.integers(0, 7), min_size=1, max_size=5), st.sampled_from([1, 4]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_padded_rows_hold_every_count_and_are_never_empty(counts: list[int], multiple: int, same_size: bool) -> None:
    layout = layout_rows(counts, multiple, same_size, CPU)
    assert layout.total > 0
    assert all(size % multiple == 0 and size >= count for size, count in zip(layout.sizes, counts, strict=True))
    assert layout.ends_E.tolist() == [start + size for start, size in zip(layout.starts, layout.sizes, strict=True)]
    if same_size:
        assert len(set(layout.sizes)) == 1


@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 5), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_scatter_and_gather_are_each_others_gradient(rows: int, repeat: int, extra: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    total = rows * repeat + extra
    place = torch.randperm(total, generator=generator)[: rows * repeat]
    x = torch.randn(rows, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    y = torch.randn(total, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.equal(gather_rows(scatter_rows(x, place, total, repeat), place), x.repeat_interleave(repeat, 0))
    assert torch.autograd.gradcheck(lambda t: scatter_rows(t, place, total, repeat), x)
    assert torch.autograd.gradcheck(lambda t: gather_rows(t, place), y)


@pytest.mark.parametrize("kernel", get_args(Kernel))
@pytest.mark.parametrize("multiple", [1, 4])
@given(case=routings(), seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_experts_equal_a_loop_over_tokens(kernel: Kernel, multiple: int, case: tuple[torch.Tensor, int], seed: int) -> None:
    chosen, count = case
    generator = torch.Generator().manual_seed(seed)
    experts = Experts(count, 4, 8)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, generator=generator)
    x = torch.randn(len(chosen), 4, generator=generator, requires_grad=True)
    weights = torch.rand(chosen.shape, generator=generator, requires_grad=True)
    counts = torch.bincount(chosen.flatten(), minlength=count)
    assert counts.sum() == chosen.numel(), "dropless"

    ours = run_experts(
        x, chosen, weights, counts, lambda rows, layout: experts(rows, layout, kernel), multiple, kernel == "padded_bmm", None
    )
    theirs = by_token(x, chosen, weights, experts)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    probe = torch.randn(theirs.shape, generator=generator)
    inputs = [x, weights, *experts.parameters()]
    got = torch.autograd.grad((ours * probe).sum(), inputs)
    want = torch.autograd.grad((theirs * probe).sum(), inputs)
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-3)


@given(case=routings(), seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_the_order_within_a_tokens_choice_does_not_matter(case: tuple[torch.Tensor, int], seed: int) -> None:
    chosen, count = case
    generator = torch.Generator().manual_seed(seed)
    experts = Experts(count, 4, 8)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, generator=generator)
    x = torch.randn(len(chosen), 4, generator=generator, requires_grad=True)
    weights = torch.rand(chosen.shape, generator=generator)
    counts = torch.bincount(chosen.flatten(), minlength=count)
    orders = torch.stack([torch.randperm(chosen.shape[1], generator=generator) for _ in chosen])
    probe = torch.randn(x.shape, generator=generator)

    def train(chosen: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
        out = run_experts(x, chosen, weights, counts, lambda rows, layout: experts(rows, layout, "grouped_mm"), 1, False, None)
        return [out, *torch.autograd.grad((out * probe).sum(), [x, *experts.parameters()])]

    for one, other in zip(train(chosen, weights), train(chosen.gather(1, orders), weights.gather(1, orders)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.multiprocess
def test_outputs_and_gradients_are_the_same_for_every_degree_of_expert_parallelism(tmp_path: Path) -> None:
    run_together(4, tmp_path, dispatch_cases.every_ep_equals_a_loop_over_tokens)
