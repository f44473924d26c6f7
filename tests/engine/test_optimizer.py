"""AdamW on parts is torch's. Moments in bf16 train like moments in fp32, take half the memory, and continue bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hpcmoe.config.schema import OptimConfig, PrecisionConfig
from hpcmoe.engine.bf16_moments import AdamWBf16Moments
from hpcmoe.engine.optimizer import build_optimizer, named_moments
from hpcmoe.engine.parallelize import initial_values
from hpcmoe.models.transformer import Transformer
from hpcmoe.planner.plan import workload
from tests.engine.ranks import small_config, small_model

OPTIM = OptimConfig(lr=3e-3, betas=[0.9, 0.95], weight_decay=0.1)
TEXT = torch.frombuffer(bytearray(b"the router sends each token to two experts of eight. " * 40), dtype=torch.uint8).long()


def start(moments: str) -> tuple[Transformer, torch.optim.Optimizer]:
    net = initial_values(small_model(), 0)
    return net, build_optimizer(net.parameters(), OPTIM, moments)


def train(net: Transformer, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch = TEXT[7 * step : 7 * step + 66].view(2, 33)
        loss = F.cross_entropy(net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        net.drain_loads()
        losses.append(loss.item())
    return losses


def test_fp32_steps_are_torchs_fused_adamw_bit_by_bit() -> None:
    (net, ours), (other, _) = start("fp32"), start("fp32")
    matrices, vectors = ([p for p in other.parameters() if (p.dim() > 1) is wide] for wide in (True, False))
    decays = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(decays, lr=3e-3, betas=(0.9, 0.95), eps=OPTIM.eps, fused=True)
    assert train(net, ours, range(4)) == train(other, theirs, range(4))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def test_fifty_steps_with_bf16_moments_stay_close_to_fp32() -> None:
    exact, rounded = (train(*start(moments), range(50)) for moments in ("fp32", "bf16"))
    assert exact[-1] < 0.6 * exact[0], "the case must learn"
    assert max(abs(a - b) for a, b in zip(exact, rounded, strict=True)) < 0.02 * exact[0]


def test_one_step_is_fp32_adamw_up_to_the_order_of_operations() -> None:
    """The first step's moments are exact before they are stored, so the update is torch's."""
    (net, ours), (other, theirs) = start("bf16"), start("fp32")
    train(net, ours, range(1))
    train(other, theirs, range(1))
    for mine, wanted in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-7)


def test_moments_take_half_the_bytes_and_parameters_stay_fp32() -> None:
    sizes = {}
    for moments in ("fp32", "bf16"):
        net, optimizer = start(moments)
        before = moment_bytes(net, optimizer)
        train(net, optimizer, range(1))
        sizes[moments] = moment_bytes(net, optimizer)
        assert before == sizes[moments], "the state before the first step is the state after it"
        assert {p.dtype for p in net.parameters()} == {torch.float32}
    parameters = sum(p.numel() for p in net.parameters())
    assert sizes == {"fp32": 8 * parameters, "bf16": 4 * parameters}
    for moments, size in sizes.items():
        config = small_config(Path("text"), 1, 1, 1, precision=PrecisionConfig(moments=moments))
        assert workload(config).optim_bytes * parameters == size, "what the planner counts"


def moment_bytes(net: Transformer, optimizer: torch.optim.Optimizer) -> int:
    entries = named_moments(net.named_parameters(), optimizer).values()
    return sum(value.nbytes for entry in entries for name, value in entry.items() if name != "step")


def test_a_continued_run_is_bitwise_the_uninterrupted_one() -> None:
    net, optimizer = start("bf16")
    train(net, optimizer, range(3))
    values = {name: p.detach().clone() for name, p in net.named_parameters()}
    moments = {
        name: {key: value.clone() for key, value in entry.items()}
        for name, entry in named_moments(net.named_parameters(), optimizer).items()
    }
    wanted = train(net, optimizer, range(3, 6))
    again, fresh = start("bf16")
    with torch.no_grad():
        for name, parameter in again.named_parameters():
            parameter.copy_(values[name])
        for name, entry in named_moments(again.named_parameters(), fresh).items():
            for key, value in entry.items():
                value.copy_(moments[name][key])
    assert train(again, fresh, range(3, 6)) == wanted
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), net.parameters(), strict=True))


def last_square(beta: float) -> float:
    """The second moment after one gradient of 1 and then 200 of 0, as a share of the exact one; the beta is not checked."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = AdamWBf16Moments([{"params": [parameter]}], 0.0, (0.9, 0.9), 1e-8)
    optimizer.param_groups[0]["betas"] = (0.9, beta)
    for step in range(201):
        parameter.grad = torch.full((1,), float(step == 0))
        optimizer.step()
    return optimizer.state[parameter]["exp_avg_sq"].item() / ((1 - beta) * beta**200)


def test_a_second_moment_decays_in_bf16_up_to_the_highest_beta_and_not_beyond() -> None:
    assert last_square(0.95) == pytest.approx(1.0, rel=0.1)
    assert last_square(0.99) == pytest.approx(1.0, rel=0.25)
    assert last_square(0.999) > 1.2, "this is why it is refused"


def test_betas_beyond_it_are_refused() -> None:
    changed: dict[str, Any] = {"lr": 1e-3, "betas": [0.9, 0.999]}
    with pytest.raises(ValueError, match=r"use betas up to 0\.99"):
        build_optimizer([torch.nn.Parameter(torch.zeros(2))], OptimConfig(**changed), "bf16")
