"""RMS norms in Triton: every input is read once, every output written once, sums in fp32.

A program holds whole rows (or whole groups of a row) in registers, so nothing is read twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def row_tile(width: int) -> tuple[int, int, int]:
    """Rows per program, padded row width and warps for a kernel that holds whole rows of `width` in registers."""
    block = triton.next_power_of_2(width)
    rows = max(1, 1024 // block)
    return rows, block, min(16, max(4, rows * block // 512))


@triton.jit
def rms_scale(x, D: tl.constexpr, eps):
    """1 / sqrt(mean(x^2) + eps) of each row of an fp32 tile [rows, columns] that is zero past column D."""
    return tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]


@triton.jit
def silu(x):
    """x * sigmoid(x) of an fp32 tile."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    rows,
    eps,
    x_stride,
    gate_stride,
    PARTS: tl.constexpr,
    D: tl.constexpr,
    GROUPED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`rows` parts of D elements, PARTS of them side by side in each row of x; GROUPED: each with its own weights."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < D)
    outer, part = row // PARTS, row % PARTS
    x = tl.load(x_ptr + outer * x_stride + part * D + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_GATE:
        gate = tl.load(gate_ptr + outer * gate_stride + part * D + column, mask=mask, other=0.0).to(tl.float32)
        x *= silu(gate)
    if GROUPED:
        weight = tl.load(weight_ptr + part * D + column, mask=mask, other=0.0).to(tl.float32)
    else:
        weight = tl.load(weight_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    y = x * rms_scale(x, D, eps) * weight
    tl.store(out_ptr + row * D + column, y.to(out_ptr.dtype.element_ty), mask=mask)


def _norm_parts(
    x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, grouped: bool, out: Tensor | None = None
) -> Tensor:
    """The norm of each [i, j] of x [rows, parts, D], contiguous but for dim 0; weight [D], or [parts, D] if grouped."""
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    outer, parts, width = x.shape
    rows, block, warps = row_tile(width)
    other = x if gate is None else gate
    if out.numel():
        _rms_norm_kernel[(triton.cdiv(outer * parts, rows),)](
            x,
            other,
            weight,
            out,
            outer * parts,
            eps,
            x.stride(0),
            other.stride(0),
            PARTS=parts,
            D=width,
            GROUPED=grouped,
            HAS_GATE=gate is not None,
            ROWS=rows,
            BLOCK=block,
            num_warps=warps,
        )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of each row: x / sqrt(mean(x^2) + eps) * weight.

    x: [..., D] fp32/bf16/fp16, contiguous but for dim 0.
    weight: [D] any float dtype.
    Returns [..., D] contiguous, dtype of x; sums in fp32.
    """
    parts = x.view(1, 1, -1) if x.dim() == 1 else x.unsqueeze(1).flatten(1, -2)
    return _norm_parts(parts, None, weight, eps, grouped=False).view(x.shape)


def gated_rms_norm(
    x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, n_groups: int, out: Tensor | None = None
) -> Tensor:
    """Mamba-2's output norm: RMSNorm of x * silu(gate), each of the n_groups slices of a row on its own.

    x, gate: [T, W] fp32/bf16/fp16, contiguous but for dim 0; gate may be None.
    weight: [W] any float dtype.
    out: [T, W] contiguous, dtype of x, written; None makes it.
    Returns out; gate and sums in fp32.
    """
    shape = (n_groups, x.shape[1] // n_groups)
    gate = None if gate is None else gate.unflatten(1, shape)
    return _norm_parts(x.unflatten(1, shape), gate, weight, eps, grouped=True, out=out).view(x.shape)


@triton.jit
def _finish_gated_norm_kernel(
    x_ptr,
    sums_ptr,
    weight_ptr,
    out_ptr,
    eps,
    x_stride,
    sums_stride,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP_HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """One block of columns of one group of one row per program: the sums are known, so blocks are independent."""
    pid = tl.program_id(0)
    row = (pid // (GROUPS * BLOCKS)).to(tl.int64)
    group = pid // BLOCKS % GROUPS
    head = tl.arange(0, BLOCK_HEADS)
    sums = tl.load(sums_ptr + row * sums_stride + group * GROUP_HEADS + head, mask=head < GROUP_HEADS, other=0.0)
    scale = tl.rsqrt(tl.sum(sums, axis=0) / GROUP_SIZE + eps)
    within = pid % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    mask = within < GROUP_SIZE
    column = group * GROUP_SIZE + within
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    y = x * scale * weight
    tl.store(out_ptr + row * (GROUPS * GROUP_SIZE) + column, y.to(out_ptr.dtype.element_ty), mask=mask)


def finish_gated_norm(
    x: Tensor, sum_squares: Tensor, weight: Tensor, eps: float, n_groups: int, out: Tensor | None = None
) -> Tensor:
    """The rest of `gated_rms_norm` where `state_update` left gated rows and their sums of squares.

    x: [T, H*P] fp32/bf16/fp16, contiguous but for dim 0.
    sum_squares: [T, H] fp32.
    weight: [H*P] any float dtype.
    out: [T, H*P] contiguous, dtype of x, written; None makes it.
    Returns out.
    """
    rows, width = x.shape
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    group_size, group_heads = width // n_groups, sum_squares.shape[1] // n_groups
    block = min(triton.next_power_of_2(group_size), 2048)
    blocks = triton.cdiv(group_size, block)
    if rows:
        _finish_gated_norm_kernel[(rows * n_groups * blocks,)](
            x,
            sum_squares,
            weight,
            out,
            eps,
            x.stride(0),
            sum_squares.stride(0),
            GROUPS=n_groups,
            GROUP_SIZE=group_size,
            GROUP_HEADS=group_heads,
            BLOCKS=blocks,
            BLOCK=block,
            BLOCK_HEADS=triton.next_power_of_2(group_heads),
            num_warps=max(1, min(4, block // 256)),
        )
    return out
