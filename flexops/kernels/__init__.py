"""Fused operators for packed batches of hybrid (attention + SSM) layers: the public, checked face.

    from flexops import kernels as fk

Tensors are packed: T tokens of R sequences, `cu_seqlens` int32 [R+1], no padding between them. Sizes in shapes: D
hidden size; Hq, Hk, d attention heads, kv heads and head dim; H, P, G, N SSM heads, head dim, groups and state size;
C conv channels; K conv width; E gate dim. -1 in a table of rows or pages means "none".
Activations are fp32, bf16 or fp16 ("x dtype" below), weights any of these, SSM states fp32; sums are taken in fp32 and
results rounded once. fp64 runs the definition in `reference.py`, with everything in fp64. Memory must be contiguous,
but dim 0 may have a larger stride: slices of a fused projection and pages of one pool are passed as they are.
`out` is memory for an operator's results, written and returned: contiguous, of their shape and dtype, and not memory of
another argument. None makes new memory.
Every operator raises ValueError, with the argument's name and what is allowed, before it writes anything: for a wrong
shape, dtype, device or stride, and for an index out of range, or named twice where it is written (on the CPU; elsewhere
where FLEXOPS_DEBUG=1). On several GPUs, an operator runs on that of its tensors, whichever is current.
Where a gradient is recorded, plain differentiable forms run instead; operators that work in place refuse.
torch.compile and torch.export see one node per operator. A limit of torch: a compiled graph cannot write two caches of
different dtypes that are views of one buffer.
"""

import sys

from torch import Tensor

from . import checks, face, reference, results, training
from .dispatch import backend
from .library import OPS, raw
from .reference import ATTENTION, GATE_TILE, SSM

__all__ = [
    "ATTENTION",
    "GATE_TILE",
    "SSM",
    "append_kv",
    "apply_rope",
    "attention_workspace",
    "backend",
    "causal_conv1d",
    "decode_branches",
    "finish_gated_norm",
    "gate_pool",
    "gate_route",
    "gated_rms_norm",
    "gather_rows",
    "merge_norm",
    "paged_attention",
    "rms_norm",
    "scatter_rows",
    "silu_mul",
    "split_norm",
    "ssd_scan",
    "state_update",
    "varlen_attention",
]


sys.modules[__name__].__class__ = face.module_that_keeps(__all__)


# --- norms and activation -------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of each row: x / sqrt(mean(x^2) + eps) * weight.

    x: [..., D] x dtype, rows to normalise, read.
    weight: [D] float, scale of each column, read.
    eps: added to the mean square.
    Returns [..., D] x dtype, new. Accumulates in fp32. Differentiable.
    Raises ValueError. Implements the RMSNorm of §4.
    """
    if face.records_gradient(x, weight):
        checks.rms_norm(face.rows(x), weight, eps)
        return reference.rms_norm(x, weight, eps)
    return face.rows_back(OPS.rms_norm(face.rows(x), weight, eps), x)


def silu_mul(gate: Tensor, up: Tensor, out: Tensor | None = None) -> Tensor:
    """The SwiGLU activation silu(gate) * up, elementwise.

    gate: [..., F] x dtype, read.
    up: [..., F] x dtype, read; the same shape.
    out: [..., F] x dtype or None, written.
    Returns out. Computes in fp32. Differentiable.
    Raises ValueError. Implements the FFN's activation of §4.
    """
    if face.records_gradient(gate, up):
        face.without_out("silu_mul", out)
        checks.silu_mul(face.rows(gate), face.rows(up))
        return reference.silu_mul(gate, up)
    if out is None:
        return face.rows_back(OPS.silu_mul(face.rows(gate), face.rows(up)), gate)
    results.check_given("silu_mul", (gate, up), (out,))  # before leading dims are joined, which may copy
    face.run("silu_mul", (face.rows(gate), face.rows(up)), face.rows(out))
    return out


def gated_rms_norm(
    x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, n_groups: int, out: Tensor | None = None
) -> Tensor:
    """Mamba-2's output norm: RMSNorm of x * silu(gate), each of the n_groups slices of a row on its own.

    x: [T, D] x dtype, read.
    gate: [T, D] x dtype or None (no gate), read.
    weight: [D] float, read.
    eps: added to the mean square.  n_groups: slices of a row, a divisor of D.
    out: [T, D] x dtype or None, written.
    Returns out. Accumulates in fp32. Differentiable.
    Raises ValueError. Implements the output norm of the SSM branch (§2.1).
    """
    return face.run_or_record("gated_rms_norm", (x, gate, weight, eps, n_groups), out)


def finish_gated_norm(
    x: Tensor, sum_squares: Tensor, weight: Tensor, eps: float, n_groups: int, out: Tensor | None = None
) -> Tensor:
    """The rest of `gated_rms_norm` after `state_update`, which leaves gated rows and their sums of squares.

    x: [T, H*P] x dtype, gated rows, read.
    sum_squares: [T, H] fp32, sums of squares of each head of a row, read.
    weight: [H*P] float, read.
    eps: added to the mean square.  n_groups: slices of a row, a divisor of H.
    out: [T, H*P] x dtype or None, written.
    Returns out. Accumulates in fp32. Differentiable.
    Raises ValueError. Implements the output norm of the SSM branch (§2.1).
    """
    return face.run_or_record("finish_gated_norm", (x, sum_squares, weight, eps, n_groups), out)


# --- gate -----------------------------------------------------------------------------------------------------


def gate_pool(
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    w1: Tensor,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Input of an adaptive layer: residual += delta, u = RMSNorm(residual), and the gate's rows z = u W1^T.

    residual: [T, D] x dtype, the residual stream, updated in place.
    delta: [T, D] x dtype or None, the output of the layer before, read.
    weight: [D] float, scale of the norm, read.  eps: added to the mean square.
    w1: [E, D] float, first matrix of the gate, read.
    out: u [T, D] x dtype and z [T, E] fp32, or None, written.
    Returns out. Accumulates in fp32.
    Raises ValueError, also where a gradient is recorded. Implements the gate's input of §4.
    """
    face.refuse_gradient(
        "gate_pool", "torch.no_grad(), or residual + delta, rms_norm and a matmul", residual=residual, delta=delta,
        weight=weight, w1=w1,
    )  # fmt: skip
    return face.run("gate_pool", (residual, delta, weight, eps, w1), out)


def gate_route(
    z: Tensor, cu_seqlens: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gate's choice per request: softmax and top-1 of W2 silu(mean_t z_t + b1) + b2; ties go to SSM.

    z: [T, E] fp32, rows of the requests' whole prompts from `gate_pool`, read.
    cu_seqlens: [R+1] int32, bounds of the requests' rows, none empty, read.
    b1: [E] float, w2: [2, E] float, b2: [2] float, the rest of the gate, read.
    bias: [R] float or None, added to the attention logit of each request, read.
    Returns probabilities [R, 2] fp32 (attention, ssm), differentiable, and routes [R] int32 (ATTENTION or SSM), new.
    Accumulates in fp32 in tiles of GATE_TILE rows: the same prompt gives the same bits in any batch.
    Raises ValueError. Implements Eq. 3 without noise and the top-1 choice of §4.
    """
    return face.run_or_record("gate_route", (z, cu_seqlens, b1, w2, b2, bias))


# --- split and merge ------------------------------------------------------------------------------------------


def gather_rows(x: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """out[i] = x[index[i]]: packed rows to the compact rows of a branch.

    x: [T, D] x dtype, read.
    index: [M] int32 or int64, rows of x; -1 gives a zero row, read.
    out: [M, D] x dtype or None, written.
    Returns out. Differentiable on every backend.
    Raises ValueError. Implements the split of §5.1.
    """
    if face.records_gradient(x):
        face.without_out("gather_rows", out)
    return face.run("gather_rows", (x, index), out)


def scatter_rows(out: Tensor, x: Tensor, index: Tensor) -> Tensor:
    """out[index[i]] = x[i]: compact rows of a branch back to their packed rows.

    out: [T, D] x dtype, written in place at the rows named, other rows are kept.
    x: [M, D] x dtype, read.
    index: [M] int32 or int64, rows of out, none twice; -1 writes nothing, read.
    Returns out. Differentiable on every backend: rows that were overwritten get no gradient.
    Raises ValueError. Implements the merge of §5.1.
    """
    if face.records_gradient(out, x):
        if out.requires_grad and out.is_leaf:
            raise ValueError("out: a leaf that requires a gradient cannot be written in place; allowed: out.clone()")
        return out.copy_(OPS.scattered_rows(out, x, index))
    OPS.scatter_rows(out, x, index)
    return out


def split_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, order: Tensor, out: Tensor | None = None
) -> Tensor:
    """Layer input where the routes are known: residual += delta, u[i] = RMSNorm(residual[order[i]]).

    residual: [T, D] x dtype, the residual stream, rows named in order are updated in place.
    delta: [T, D] x dtype or None, the output of the layer before, read.
    weight: [D] float, scale of the norm, read.  eps: added to the mean square.
    order: [M] int32, the packed row of each compact row (attention rows, then SSM rows), none twice; -1 gives a zero
        row; packed rows not named stay as they are, read.
    out: [M, D] x dtype or None, written.
    Returns u = out. Accumulates in fp32.
    Raises ValueError, also where a gradient is recorded. Implements the split of §5.1.
    """
    face.refuse_gradient(
        "split_norm", "torch.no_grad(), or residual + delta, gather_rows and rms_norm", residual=residual,
        delta=delta, weight=weight,
    )  # fmt: skip
    return face.run("split_norm", (residual, delta, weight, eps, order), out)


def merge_norm(
    residual: Tensor,
    y_attention: Tensor,
    y_ssm: Tensor,
    inverse: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """After the branches: residual[t] += y[inverse[t]], u = RMSNorm(residual).

    residual: [T, D] x dtype, the residual stream, updated in place.
    y_attention: [Ma, D], y_ssm: [Ms, D] x dtype, compact rows of the branches; y is the first, then the second, read.
    inverse: [T] int32, the row of y of each packed row; -1 adds nothing, read.
    weight: [D] float, scale of the norm, read.  eps: added to the mean square.
    out: [T, D] x dtype or None, written.
    Returns u = out, the input of the FFN. Accumulates in fp32.
    Raises ValueError, also where a gradient is recorded. Implements the merge of §5.1.
    """
    face.refuse_gradient(
        "merge_norm", "torch.no_grad(), or gather_rows, an addition and rms_norm", residual=residual,
        y_attention=y_attention, y_ssm=y_ssm, weight=weight,
    )  # fmt: skip
    return face.run("merge_norm", (residual, y_attention, y_ssm, inverse, weight, eps), out)


# --- attention ------------------------------------------------------------------------------------------------


def apply_rope(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding in the half-split (NeoX, HF) form; dims past rotary_dim pass through.

    x: [T, heads, d] x dtype, read.
    cos_sin: [max_position, rotary_dim] float, cosines of rotary_dim/2 frequencies, then the sines, read.
    positions: [T] int32, absolute positions, read.
    Returns [T, heads, d] x dtype, new. Computes in fp32. Differentiable.
    Raises ValueError. Implements the position encoding before Eq. 1.
    """
    return face.run_or_record("apply_rope", (x, cos_sin, positions))


def append_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor | None,
    positions: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """RoPE on q and k, and k, v written to their slots of the paged cache, in one pass.

    q: [T, Hq, d], k: [T, Hk, d], v: [T, Hk, d] x dtype, d a multiple of 8 up to 256, read.
    cos_sin: [max_position, rotary_dim] float as in `apply_rope`, or None (no rotation), read.
    positions: [T] int32, absolute positions, read.
    kv_cache: [num_pages, 2, Hk, page_tokens, d] x dtype, keys then values, written in place at the slots named.
    slot_mapping: [T] int64, page * page_tokens + offset, none twice; -1 writes nothing, read.
    out: [T, Hq, d] x dtype or None, written.
    Returns out, the rotated q. Computes in fp32.
    Raises ValueError, also where a gradient is recorded. Implements the KV cache of Eq. 1.
    """
    face.refuse_gradient("append_kv", "torch.no_grad(), or apply_rope and varlen_attention", q=q, k=k, v=v)
    return face.run("append_kv", (q, k, v, cos_sin, positions, kv_cache, slot_mapping), out)


def attention_workspace(q: Tensor, kv_cache: Tensor, page_table: Tensor) -> int:
    """How many numbers of fp32 `paged_attention` and `decode_branches` work in, for these arguments of theirs.

    It depends on shapes and on the backend, not on what the tensors hold.
    """
    return raw("attention_workspace", q)(q, kv_cache, page_table)


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    scale: float,
    max_query_len: int,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Causal attention of packed queries over the pages of their requests: prefill, decode and both in one batch.

    q: [T, Hq, d] x dtype, rotated queries, d a multiple of 8 up to 256, read.
    kv_cache: [num_pages, 2, Hk, page_tokens, d] x dtype, read; Hk divides Hq.
    page_table: [R, pages] int32, pages of each request, -1 past its context, read.
    cu_seqlens: [R+1] int32, bounds of the requests' queries, read.
    context_lens: [R] int32, tokens in the cache, the queries' own included: query j of request r sits at position
        context_lens[r] - query_len[r] + j; 0 where the one query of a request is padding: a zero row, read.
    scale: factor on the scores, usually d^-0.5.  max_query_len: the longest query or more.
    out: [T, Hq, d] x dtype or None, written.
    workspace: [n] fp32, n from `attention_workspace`, or None, written; given with out alone.
    Returns out. Accumulates in fp32.
    Raises ValueError, also where a gradient is recorded. Implements Eq. 1.
    """
    face.refuse_gradient("paged_attention", "torch.no_grad(), or varlen_attention", q=q, kv_cache=kv_cache)
    arguments = (q, kv_cache, page_table, cu_seqlens, context_lens, scale, max_query_len)
    return face.run("paged_attention", arguments, out, workspace)


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """Causal self-attention within each packed sequence, without a cache: what training runs.

    q: [T, Hq, d], k: [T, Hk, d], v: [T, Hk, d] x dtype, read; Hk divides Hq.
    cu_seqlens: [R+1] int32, bounds of the sequences, read.
    scale: factor on the scores, usually d^-0.5.
    Returns [T, Hq, d] x dtype, new. Accumulates as torch's attention does. Differentiable.
    Raises ValueError. Implements Eq. 1.
    """
    checks.varlen_attention(q, k, v, cu_seqlens, scale)
    return training.varlen_attention(q, k, v, cu_seqlens, scale)


# --- SSM ------------------------------------------------------------------------------------------------------


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    seq_starts: Tensor,
    conv_cache: Tensor | None = None,
    initial_pages: Tensor | None = None,
    final_pages: Tensor | None = None,
    checkpoint_rows: Tensor | None = None,
    checkpoint_pages: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """silu(depthwise causal convolution) over packed sequences, continuing from and leaving a window of inputs.

    x: [T, C] x dtype, read.
    weight: [C, K] float, K from 2 to 4, weight[:, K-1] meets the newest input, read.  bias: [C] float or None, read.
    cu_seqlens: [R+1] int32, bounds of the sequences, read.
    seq_starts: [R] int32, absolute position of the first row of each sequence, read.
    conv_cache: [num_pages, K, channels_per_page] x dtype or None, the last K inputs of a request, the one at absolute
        position p in slot p % K, channels cut into Nc pages; written in place at final_pages and checkpoint_pages.
    initial_pages, final_pages: [R, Nc] int32 or None, where windows are read (-1: zeros) and written (-1: not), read.
    checkpoint_rows: [S] int32 or None, packed rows after which the window is also written, none twice, read.
    checkpoint_pages: [S, Nc] int32 or None, to these pages, read.
    out: [T, C] x dtype or None, written.
    Returns out. Accumulates in fp32. Differentiable without a cache.
    Raises ValueError. Implements the short convolution before Eq. 2.
    """
    if not face.records_gradient(x, weight, bias):
        caches = (conv_cache, initial_pages, final_pages, checkpoint_rows, checkpoint_pages)
        return face.run("causal_conv1d", (x, weight, bias, cu_seqlens, seq_starts, *caches), out)
    face.without_out("causal_conv1d", out)
    face.without_cache("causal_conv1d", conv_cache)
    checks.causal_conv1d(x, weight, bias, cu_seqlens, seq_starts)
    return training.causal_conv1d(x, weight, bias, cu_seqlens)


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor,
    seq_starts: Tensor,
    chunk_size: int,
    state_cache: Tensor | None = None,
    initial_pages: Tensor | None = None,
    final_pages: Tensor | None = None,
    checkpoint_rows: Tensor | None = None,
    checkpoint_pages: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Mamba-2's selective scan over packed sequences, continuing from and leaving paged states.

    x: [T, H, P] x dtype, P a multiple of 8 up to 256, read.
    dt: [T, H] float, step sizes before dt_bias and softplus, read.
    A_log: [H] float, read.  B, C: [T, G, N] x dtype, G divides H, N from 16 to 256, read.
    D: [H] float or None, skip.  dt_bias: [H] float or None, read.
    cu_seqlens: [R+1] int32, bounds of the sequences, read.
    seq_starts: [R] int32, absolute position of the first row of each sequence, read.
    chunk_size: a power of two from 16; chunks are cut at multiples of it in absolute position.
    state_cache: [num_pages, heads_per_page, P, N] fp32 or None, heads cut into Ns pages; written in place at
        final_pages and checkpoint_pages.
    initial_pages, final_pages: [R, Ns] int32 or None, where states are read (-1: zero) and written (-1: not), read.
    checkpoint_rows: [S] int32 or None, packed rows at chunk ends after which the state is also written, read.
    checkpoint_pages: [S, Ns] int32 or None, to these pages, read.
    out: [T, H, P] x dtype or None, written. What the chunked form keeps between its launches it makes itself.
    Returns y = out. Accumulates in fp32. Differentiable without a cache.
    Raises ValueError. Implements Eq. 2.
    """
    if not face.records_gradient(x, dt, A_log, B, C, D, dt_bias):
        caches = (state_cache, initial_pages, final_pages, checkpoint_rows, checkpoint_pages)
        sequences = (cu_seqlens, seq_starts, chunk_size)
        return face.run("ssd_scan", (x, dt, A_log, B, C, D, dt_bias, *sequences, *caches), out)
    face.without_out("ssd_scan", out)
    face.without_cache("ssd_scan", state_cache)
    checks.ssd_scan(x, dt, A_log, B, C, D, dt_bias, cu_seqlens, seq_starts, chunk_size)
    return training.ssd_scan(x, dt, A_log, B, C, D, dt_bias, cu_seqlens, chunk_size)


def state_update(
    xBC: Tensor,
    z: Tensor,
    dt: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    positions: Tensor,
    conv_cache: Tensor,
    conv_pages_in: Tensor,
    conv_pages_out: Tensor,
    state_cache: Tensor,
    state_pages_in: Tensor,
    state_pages_out: Tensor,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """One decode token of the Mamba-2 mixer per request, between its two projections, in one pass.

    xBC: [R, C] x dtype with C = H*P + 2*G*N (x, then B, then C), z: [R, H*P] x dtype, dt: [R, H] float: slices of the
        in-projection, read.
    conv_weight: [C, K] float, conv_bias: [C] float or None, A_log: [H], D and dt_bias: [H] float or None, read.
    positions: [R] int32, absolute position of each token, read.
    conv_cache: [num_pages, K, channels_per_page] x dtype as in `causal_conv1d`, written in place at conv_pages_out.
    state_cache: [num_pages, heads_per_page, P, N] fp32 as in `ssd_scan`, written in place at state_pages_out.
    conv_pages_in, conv_pages_out: [R, Nc] int32, state_pages_in, state_pages_out: [R, Ns] int32: read and written
        pages, which may be the same; an input -1 is zero, an output -1 skips the request (zero results), read.
    out: [R, H*P] x dtype and [R, H] fp32, or None, written.
    Returns out: y * silu(z) and the sums of its squares per head; `finish_gated_norm` takes both. Accumulates in fp32.
    Raises ValueError, also where a gradient is recorded. Implements Eq. 2 for one token.
    """
    face.refuse_gradient(
        "state_update", "torch.no_grad(), or causal_conv1d and ssd_scan", xBC=xBC, z=z, dt=dt, conv_weight=conv_weight,
        conv_bias=conv_bias, A_log=A_log, D=D, dt_bias=dt_bias, state_cache=state_cache,
    )  # fmt: skip
    ssm = (xBC, z, dt, conv_weight, conv_bias, A_log, D, dt_bias, positions)
    caches = (conv_cache, conv_pages_in, conv_pages_out, state_cache, state_pages_in, state_pages_out)
    return face.run("state_update", (*ssm, *caches), out)


def decode_branches(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    scale: float,
    xBC: Tensor,
    z: Tensor,
    dt: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    positions: Tensor,
    conv_cache: Tensor,
    conv_pages_in: Tensor,
    conv_pages_out: Tensor,
    state_cache: Tensor,
    state_pages_in: Tensor,
    state_pages_out: Tensor,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The decodes of both branches of one layer together: `paged_attention` of one query each, and `state_update`.

    q: [Ra, Hq, d] x dtype, the query of attention request r in row r, rotated; kv_cache [num_pages, 2, Hk,
        page_tokens, d] x dtype, page_table [Ra, pages] int32, context_lens [Ra] int32, scale: as in
        `paged_attention`, read.
    xBC [Rs, C] x dtype, and z, dt, conv_weight, conv_bias, A_log, D, dt_bias, positions of the SSM requests, their
        conv_cache and state_cache and the tables of pages: as in `state_update`; both caches are written in place.
    out: attention [Ra, Hq, d] x dtype, y * silu(z) [Rs, H*P] x dtype and its sums of squares [Rs, H] fp32, or None,
        written.
    workspace: as in `paged_attention`.
    Returns out, with the bits that the two operators give. On a GPU one grid computes both. Accumulates in fp32.
    Raises ValueError, also where a gradient is recorded. Implements the concurrent branches of §5.2 for decodes.
    """
    face.refuse_gradient(
        "decode_branches", "torch.no_grad(), or varlen_attention, causal_conv1d and ssd_scan", q=q, kv_cache=kv_cache,
        xBC=xBC, z=z, dt=dt, conv_weight=conv_weight, conv_bias=conv_bias, A_log=A_log, D=D, dt_bias=dt_bias,
        state_cache=state_cache,
    )  # fmt: skip
    attention = (q, kv_cache, page_table, context_lens, scale)
    ssm = (xBC, z, dt, conv_weight, conv_bias, A_log, D, dt_bias, positions)
    caches = (conv_cache, conv_pages_in, conv_pages_out, state_cache, state_pages_in, state_pages_out)
    return face.run("decode_branches", (*attention, *ssm, *caches), out, workspace)
