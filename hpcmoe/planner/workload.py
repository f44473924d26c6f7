"""What is trained: sequence length, batch, precision and the bytes each kind of state takes. Not where (Layout) or on what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """``batch``: sequences in an optimizer step. Bytes are per value.

    Defaults are hpcmoe's: fp32 parameters, gradients and Adam moments, bf16 compute: 16 bytes of state a parameter.
    """

    seq: int
    batch: int
    precision: str = "bf16"  # fp32 | bf16 | fp8
    param_bytes: float = 4.0
    grad_bytes: float = 4.0
    optim_bytes: float = 8.0
    compute_bytes: float = 2.0
    reduce_bytes: float = 4.0
    logit_bytes: float = 10.0  # a logit: 16-bit, its fp32 copy, the fp32 gradient; fused in-place losses need 4
    flash: bool = True
    fused: bool = False  # permutes in hand-written kernels (Megatron); False: PyTorch's own
    sequence_parallel: bool = True
    compiled: bool = False  # torch.compile on each block; hpcmoe does not
    padded: bool = False  # every expert padded to the fullest of its rank (hpcmoe on GPUs without a fused grouped matmul: sm80)
    own: bool = True  # run by hpcmoe; False: a published row, whose framework spreads layers evenly over ranks, for one thing
    imbalance: bool = True  # routing as the model chooses; False: forced or capacity-limited balance
    dedup: bool = False  # one copy of a token travels to a node, however many of its experts sit there
    overlap_tp: float = 0.0  # share of tensor-parallel transfers behind matmuls
    overlap_a2a: float = 0.0  # share of the all-to-all behind other work
