"""The SwiGLU activation in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexops.kernels.norm import silu


@triton.jit
def _silu_mul_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    rows,
    gate_stride,
    up_stride,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    row = (pid // BLOCKS * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (pid % BLOCKS * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (row < rows) & (column < WIDTH)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + column, (silu(gate) * up).to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(gate: Tensor, up: Tensor, out: Tensor | None = None) -> Tensor:
    """The SwiGLU activation silu(gate) * up, elementwise.

    gate, up: [T, F] fp32/bf16/fp16, contiguous but for dim 0 (halves of a fused projection).
    out: [T, F] contiguous, dtype of gate, written; None makes it.
    Returns out; computed in fp32.
    """
    rows, width = gate.shape
    if out is None:
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    block = min(triton.next_power_of_2(width), 2048)
    tile_rows = 2048 // block
    blocks = triton.cdiv(width, block)
    if out.numel():
        _silu_mul_kernel[(triton.cdiv(rows, tile_rows) * blocks,)](
            gate,
            up,
            out,
            rows,
            gate.stride(0),
            up.stride(0),
            WIDTH=width,
            BLOCKS=blocks,
            ROWS=tile_rows,
            BLOCK=block,
            num_warps=4,
        )
    return out
