"""The norm is torch's, outputs and gradients, whatever the dtype and however many dimensions stand before the last."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hpcmoe.models.live_bytes import LiveBytes
from hpcmoe.models.norm import RMSNorm


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 4, 16), (0, 16)])
def test_outputs_and_gradients_are_torchs(dtype: torch.dtype, tolerance: float, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(16, 1e-6).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(16, generator=generator))
    x = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    probe = torch.randn(shape, generator=generator).to(dtype)
    ours, theirs = norm(x), F.rms_norm(x, (16,), norm.weight, 1e-6)
    assert ours.dtype == theirs.dtype == dtype
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    for got, want in zip(*(torch.autograd.grad(y, [x, norm.weight], probe) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_a_large_or_a_tiny_input_does_not_overflow() -> None:
    norm = RMSNorm(8, 1e-6)
    assert torch.allclose(norm(torch.full((1, 8), 1e15)), torch.ones(8))
    assert torch.allclose(norm(torch.full((1, 8), 1e-2)), torch.ones(8), rtol=0.01)


def test_beside_its_input_it_keeps_one_number_a_row() -> None:
    x = torch.randn(10, 64, requires_grad=True)
    with LiveBytes() as live:
        out = RMSNorm(64, 1e-6)(x)
        kept = live.now() - out.nbytes
    assert kept == 10 * 4 + 64 * 4, "a number a row, and the weight made here"
