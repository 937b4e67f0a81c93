"""The operators of flexops in plain torch: what each one means, written to be read.

Every faster form (Triton on a GPU, numba on a CPU) computes what stands here and is tested against it.
Arithmetic is done in fp32, or in fp64 where the input is fp64, so the same code is its own oracle;
results are rounded once to the dtype of the input. Recurrences are loops over tokens.

Shapes: T packed tokens of R sequences (`cu_seqlens` int32 [R+1]), D hidden size, Hq/Hk/d attention heads
and head dim, H/P/G/N SSM heads, head dim, groups and state size, K conv width, E gate dim.
Caches are views of one page pool, contiguous but for dim 0; every table of pages or rows uses -1 for "none".
`out` is memory for the result, contiguous, of its shape and dtype; None makes it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

ATTENTION = 0
SSM = 1
GATE_TILE = 64  # tokens per partial sum of the gate, at absolute positions of the prompt


def _acc(x: Tensor) -> Tensor:
    """x in the dtype that sums are taken in: fp64 stays, everything else becomes fp32."""
    return x if x.dtype == torch.float64 else x.float()


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    """The result, in `out` where that is given: its memory, of the result's shape and dtype, is then written."""
    return result if out is None else out.copy_(result)


# --- norms and activation -------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of each row: x / sqrt(mean(x^2) + eps) * weight."""
    xf = _acc(x)
    y = xf * torch.rsqrt(xf.square().mean(-1, keepdim=True) + eps) * _acc(weight)
    return y.to(x.dtype)


def silu_mul(gate: Tensor, up: Tensor, out: Tensor | None = None) -> Tensor:
    """The SwiGLU activation silu(gate) * up, elementwise on [T, F]."""
    return _into(out, (F.silu(_acc(gate)) * _acc(up)).to(gate.dtype))


def gated_rms_norm(
    x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, n_groups: int, out: Tensor | None = None
) -> Tensor:
    """Mamba-2's output norm: RMSNorm of x * silu(gate), each of the n_groups slices of a row on its own."""
    xf = _acc(x)
    if gate is not None:
        xf = xf * F.silu(_acc(gate))
    groups = xf.unflatten(-1, (n_groups, -1))
    groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    return _into(out, (groups.flatten(-2) * _acc(weight)).to(x.dtype))


def finish_gated_norm(
    x: Tensor, sum_squares: Tensor, weight: Tensor, eps: float, n_groups: int, out: Tensor | None = None
) -> Tensor:
    """The rest of `gated_rms_norm` where `state_update` left gated rows [T, H*P] and sums of squares [T, H]."""
    group_size = x.shape[-1] // n_groups
    mean = _acc(sum_squares).unflatten(-1, (n_groups, -1)).sum(-1) / group_size
    groups = _acc(x).unflatten(-1, (n_groups, -1)) * torch.rsqrt(mean + eps).unsqueeze(-1)
    return _into(out, (groups.flatten(-2) * _acc(weight)).to(x.dtype))


# --- gate -----------------------------------------------------------------------------------------------------


def gate_pool(
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    w1: Tensor,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Layer input of an adaptive layer: residual += delta, u = RMSNorm(residual), z = u W1^T in fp32.

    residual: [T, D], updated in place.  w1: [E, D].  Returns u [T, D] and z [T, E] fp32.
    """
    if delta is not None:
        residual.add_(delta)
    u = rms_norm(residual, weight, eps)
    z = _acc(u) @ _acc(w1).T
    return (u, z) if out is None else (_into(out[0], u), _into(out[1], z))


def gate_route(
    z: Tensor, cu_seqlens: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gate's choice per request from the rows z [T, E] of its whole prompt.

    logits = W2 silu(mean_t z_t + b1) + b2, softmax, top-1; ties go to SSM. `bias` [R] is added to the attention
    logit. Sums run in fixed tiles of GATE_TILE rows, so that a prompt gives the same bits wherever it lies in a
    batch. Returns probabilities [R, 2] (attention, ssm) and routes int32 [R]. Sequences must not be empty.
    """
    pooled = []
    for r in range(cu_seqlens.numel() - 1):
        rows = _acc(z[int(cu_seqlens[r]) : int(cu_seqlens[r + 1])])
        total = torch.zeros_like(rows[0])
        for tile in rows.split(GATE_TILE):
            partial = torch.zeros_like(total)
            for row in tile:
                partial = partial + row
            total = total + partial
        pooled.append(total / rows.shape[0])
    hidden = F.silu(torch.stack(pooled) + _acc(b1)) if pooled else z.new_zeros(0, b1.numel())
    logits = hidden @ _acc(w2).T + _acc(b2)
    if bias is not None:
        logits = logits + torch.stack([_acc(bias), torch.zeros_like(_acc(bias))], dim=-1)
    probs = logits.softmax(-1)
    route = torch.where(logits[:, 0] > logits[:, 1], ATTENTION, SSM).to(torch.int32)
    return probs, route


# --- split and merge ------------------------------------------------------------------------------------------


def gather_rows(x: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """out[i] = x[index[i]]; rows of index -1 are zero."""
    if x.shape[0] == 0:
        return _into(out, x.new_zeros(index.shape[0], x.shape[1]))
    rows = x.index_select(0, index.clamp(min=0).long())
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    return _into(out, torch.where((index >= 0).unsqueeze(-1), rows, zero))


def scatter_rows(out: Tensor, x: Tensor, index: Tensor) -> Tensor:
    """out[index[i]] = x[i] in place; index -1 writes nothing, other indices must differ. Returns out."""
    keep = index >= 0
    return out.index_copy_(0, index[keep].long(), x[keep])


def split_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, order: Tensor, out: Tensor | None = None
) -> Tensor:
    """Layer input where the routes are known: residual[j] += delta[j], u[i] = RMSNorm(residual[order[i]]).

    order: int32 [M], the packed row of each compact row (attention rows first, then SSM rows); every packed row
    at most once, rows not named stay as they are; -1 gives a zero row.  residual [T, D] is updated in place.
    Returns the compact rows u [M, D].
    """
    if delta is not None:
        named = order[order >= 0].long()
        residual.index_add_(0, named, delta.index_select(0, named))
    return _into(out, rms_norm(gather_rows(residual, order), weight, eps))


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

    y is y_attention [Ma, D] followed by y_ssm [Ms, D]; inverse: int32 [T], -1 adds nothing.
    residual [T, D] is updated in place.  Returns u [T, D], the input of the FFN.
    """
    residual.add_(gather_rows(torch.cat([y_attention, y_ssm]), inverse))
    return _into(out, rms_norm(residual, weight, eps))


# --- attention ------------------------------------------------------------------------------------------------


def apply_rope(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, d] in the half-split (NeoX, HF) form.

    cos_sin: [max_position, rotary_dim], the cosines of rotary_dim/2 frequencies, then the sines; dims past
    rotary_dim pass through.
    """
    half = cos_sin.shape[-1] // 2
    cos, sin = _acc(cos_sin).index_select(0, positions.long()).unsqueeze(1).split(half, dim=-1)
    xf = _acc(x)
    a, b, rest = xf[..., :half], xf[..., half : 2 * half], xf[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1).to(x.dtype)


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
    """RoPE on q and k, and k, v written to their slots of the paged cache.

    q [T, Hq, d], k and v [T, Hk, d]; cos_sin as in `apply_rope` or None for no rotation; positions int32 [T];
    kv_cache [num_pages, 2, Hk, page_tokens, d], written in place; slot_mapping int64 [T], page * page_tokens +
    offset, -1 writes nothing.  Returns the rotated q [T, Hq, d].
    """
    if cos_sin is not None:
        q, k = apply_rope(q, cos_sin, positions), apply_rope(k, cos_sin, positions)
    keep = slot_mapping >= 0
    slots = slot_mapping[keep]
    page, offset = slots // kv_cache.shape[3], slots % kv_cache.shape[3]
    kv_cache[page, 0, :, offset] = k[keep].to(kv_cache.dtype)
    kv_cache[page, 1, :, offset] = v[keep].to(kv_cache.dtype)
    return _into(out, q.contiguous())


def attention_workspace(q: Tensor, kv_cache: Tensor, page_table: Tensor) -> int:
    """Numbers of fp32 that a form of `paged_attention` and `decode_branches` works in: none here."""
    return 0


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
    """Causal attention of packed queries over their requests' pages (Eq. 1).

    q [T, Hq, d] already rotated; kv_cache [num_pages, 2, Hk, page_tokens, d]; page_table int32 [R, pages], -1 past
    the context; context_lens int32 [R], tokens in the cache, the queries' own included: query j of request r sits
    at position context_lens[r] - query_len[r] + j; 0 with one query is padding, whose row is zero.  max_query_len:
    the longest query, a launch hint.  workspace: what faster forms work in.
    Returns [T, Hq, d].
    """
    out = torch.zeros_like(q) if out is None else out.zero_()
    group = q.shape[1] // kv_cache.shape[2]
    for r in range(cu_seqlens.numel() - 1):
        start, end, context = int(cu_seqlens[r]), int(cu_seqlens[r + 1]), int(context_lens[r])
        if start == end or context == 0:
            continue
        pages = page_table[r, : -(-context // kv_cache.shape[3])].long()
        keys, values = _acc(kv_cache[pages]).permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context]
        queries = _acc(q[start:end]).transpose(0, 1)
        scores = queries @ keys.repeat_interleave(group, 0).transpose(1, 2) * scale
        position = torch.arange(context - (end - start), context, device=q.device)
        hidden = torch.arange(context, device=q.device) > position.unsqueeze(-1)
        probs = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[start:end] = (probs @ values.repeat_interleave(group, 0)).transpose(0, 1).to(q.dtype)
    return out


# --- SSM ------------------------------------------------------------------------------------------------------


def _read_window(conv_cache: Tensor, pages: Tensor, channels: int) -> Tensor:
    """The ring [K, channels] of one request, fp32; zeros where it has none (first page -1)."""
    width = conv_cache.shape[1]
    if int(pages[0]) < 0:
        return _acc(conv_cache.new_zeros(width, channels))
    return _acc(conv_cache[pages.long()]).transpose(0, 1).flatten(1)[:, :channels]


def _write_window(conv_cache: Tensor, pages: Tensor, window: Tensor) -> None:
    """The inverse of `_read_window`; nothing where the first page is -1."""
    if int(pages[0]) < 0:
        return
    per_page = conv_cache.shape[2]
    for i, page in enumerate(pages.tolist()):
        part = window[:, i * per_page : (i + 1) * per_page]
        conv_cache[page, :, : part.shape[1]] = part.to(conv_cache.dtype)


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

    x [T, C]; weight [C, K]; bias [C] or None; seq_starts int32 [R], the absolute position of each sequence's first
    row.  conv_cache [num_pages, K, channels_per_page]: the last K inputs of a request, a ring in which the input at
    absolute position p stands in slot p % K; channels are cut into pages.  initial_pages / final_pages int32 [R, Nc]:
    where each window is read (-1: zeros) and written (-1: not); they may be the same pages.  checkpoint_rows int32
    [S] and checkpoint_pages int32 [S, Nc]: after packed row checkpoint_rows[s] the window is also written there.
    Returns [T, C] in the dtype of x.
    """
    out = torch.empty_like(x) if out is None else out
    width = weight.shape[1]
    wf = _acc(weight)
    checkpoints = {} if checkpoint_rows is None else {int(t): s for s, t in enumerate(checkpoint_rows)}
    for r in range(cu_seqlens.numel() - 1):
        start, end, position = int(cu_seqlens[r]), int(cu_seqlens[r + 1]), int(seq_starts[r])
        if conv_cache is not None and initial_pages is not None:
            ring = _read_window(conv_cache, initial_pages[r], x.shape[1])
        else:
            ring = _acc(x.new_zeros(width, x.shape[1]))
        for t in range(start, end):
            ring[position % width] = _acc(x[t])
            acc = torch.zeros_like(ring[0]) if bias is None else _acc(bias).clone()
            for k in range(width):  # weight[:, K-1] meets the newest input
                acc = acc + wf[:, k] * ring[(position + 1 + k) % width]
            out[t] = F.silu(acc).to(x.dtype)
            position += 1
            if conv_cache is not None and checkpoint_pages is not None and t in checkpoints:
                _write_window(conv_cache, checkpoint_pages[checkpoints[t]], ring)
        if conv_cache is not None and final_pages is not None:
            _write_window(conv_cache, final_pages[r], ring)
    return out


def _read_state(state_cache: Tensor, pages: Tensor, num_heads: int) -> Tensor:
    """One request's state [H, P, N] fp32 from its pages of [heads_per_page, P, N]; zeros where it has none."""
    if int(pages[0]) < 0:
        return state_cache.new_zeros(num_heads, *state_cache.shape[2:])
    return state_cache[pages.long()].flatten(0, 1)[:num_heads].clone()


def _write_state(state_cache: Tensor, pages: Tensor, state: Tensor) -> None:
    """The inverse of `_read_state`; nothing where the first page is -1."""
    if int(pages[0]) < 0:
        return
    per_page = state_cache.shape[1]
    for i, page in enumerate(pages.tolist()):
        part = state[i * per_page : (i + 1) * per_page]
        state_cache[page, : part.shape[0]] = part.to(state_cache.dtype)


def softplus(x: Tensor) -> Tensor:
    """max(x, 0) + log1p(exp(-|x|)): exact in both tails."""
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def _ssm_step(
    state: Tensor, x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor | None
) -> tuple[Tensor, Tensor]:
    """h = exp(dt A) h + dt x B^T, y = h C + D x (Eq. 2), one token: state [H, P, N], x [H, P], dt [H], B, C [G, N]."""
    repeat = state.shape[0] // B.shape[0]
    B, C = B.repeat_interleave(repeat, 0), C.repeat_interleave(repeat, 0)
    decay = torch.exp(-torch.exp(_acc(A_log)) * dt)
    state = state * decay[:, None, None] + (dt.unsqueeze(-1) * x).unsqueeze(-1) * B.unsqueeze(1)
    y = (state * C.unsqueeze(1)).sum(-1)
    return state, y if D is None else y + _acc(D).unsqueeze(-1) * x


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
    """Mamba-2's selective scan over packed sequences (Eq. 2), continuing from and leaving paged states.

    x [T, H, P]; dt [T, H] before bias and softplus; A_log [H]; B, C [T, G, N]; D, dt_bias [H] or None; seq_starts
    int32 [R], absolute position of each first row (chunked forms cut at multiples of chunk_size of it; the result
    does not depend on it but for rounding).  state_cache fp32 [num_pages, heads_per_page, P, N]; initial_pages /
    final_pages int32 [R, Ns], where states are read (-1: zero) and written (-1: not).  checkpoint_rows int32 [S],
    checkpoint_pages int32 [S, Ns]: the state after packed row checkpoint_rows[s] is also written there; chunked
    forms want them at chunk ends.  Returns y [T, H, P] in the dtype of x.
    """
    out = torch.empty_like(x) if out is None else out
    xf, Bf, Cf, dtf = _acc(x), _acc(B), _acc(C), _acc(dt)
    dtf = softplus(dtf if dt_bias is None else dtf + _acc(dt_bias))
    checkpoints = {} if checkpoint_rows is None else {int(t): s for s, t in enumerate(checkpoint_rows)}
    for r in range(cu_seqlens.numel() - 1):
        if state_cache is not None and initial_pages is not None:
            state = _read_state(state_cache, initial_pages[r], x.shape[1])
        else:
            state = xf.new_zeros(x.shape[1], x.shape[2], B.shape[2])
        for t in range(int(cu_seqlens[r]), int(cu_seqlens[r + 1])):
            state, y = _ssm_step(state, xf[t], dtf[t], A_log, Bf[t], Cf[t], D)
            out[t] = y.to(x.dtype)
            if state_cache is not None and checkpoint_pages is not None and t in checkpoints:
                _write_state(state_cache, checkpoint_pages[checkpoints[t]], state)
        if state_cache is not None and final_pages is not None:
            _write_state(state_cache, final_pages[r], state)
    return out


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
    """One decode token of the Mamba-2 mixer per request, between its two projections.

    xBC [R, C] with C = H*P + 2*G*N (x, then B, then C) and z [R, H*P], dt [R, H]: slices of the in-projection.
    positions int32 [R]: absolute position of the token.  The conv window and state are read from `*_pages_in` and
    written to `*_pages_out` (int32 [R, pages]; the same pages update in place; an input -1 is zero, an output -1
    skips the request: nothing is written and its rows of the results are zero).  Layouts of the caches as in
    `causal_conv1d` and `ssd_scan`.  Conv outputs are rounded to the dtype of xBC, as in prefill.
    Returns y * silu(z) [R, H*P] in the dtype of xBC, and fp32 sums of its squares per head [R, H]; the grouped norm
    that follows is finished by `finish_gated_norm`.
    """
    num_heads, (head_dim, d_state) = A_log.numel(), state_cache.shape[2:]
    d_inner = num_heads * head_dim
    width = conv_weight.shape[1]
    if out is None:
        out = torch.empty_like(z, dtype=xBC.dtype), _acc(z.new_empty(z.shape[0], num_heads))
    gated_rows, sums = (x.zero_() for x in out)
    dtf = softplus(_acc(dt) if dt_bias is None else _acc(dt) + _acc(dt_bias))
    for r in range(xBC.shape[0]):
        if int(state_pages_out[r, 0]) < 0:
            continue
        position = int(positions[r])
        ring = _read_window(conv_cache, conv_pages_in[r], xBC.shape[1])
        ring[position % width] = _acc(xBC[r])
        conv = torch.zeros_like(ring[0]) if conv_bias is None else _acc(conv_bias).clone()
        for k in range(width):
            conv = conv + _acc(conv_weight)[:, k] * ring[(position + 1 + k) % width]
        conv = _acc(F.silu(conv).to(xBC.dtype))
        x = conv[:d_inner].view(num_heads, head_dim)
        B, C = conv[d_inner:].view(2, -1, d_state)
        state = _read_state(state_cache, state_pages_in[r], num_heads)
        state, y = _ssm_step(state, x, dtf[r], A_log, B, C, D)
        gated = y * F.silu(_acc(z[r])).view_as(y)
        gated_rows[r] = gated.flatten().to(xBC.dtype)
        sums[r] = gated.square().sum(-1)
        _write_window(conv_cache, conv_pages_out[r], ring)
        _write_state(state_cache, state_pages_out[r], state)
    return gated_rows, sums


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
    """The decodes of one layer, both branches: `paged_attention` with one query a request, and `state_update`.

    q [Ra, Hq, d] with the query of attention request r in row r, kv_cache, page_table and context_lens as in
    `paged_attention`; the rest as in `state_update`.  Returns attention [Ra, Hq, d] and what `state_update` returns.
    """
    rows = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    of_attention = None if out is None else out[0]
    attention = paged_attention(q, kv_cache, page_table, rows, context_lens, scale, 1, of_attention)
    ssm = (xBC, z, dt, conv_weight, conv_bias, A_log, D, dt_bias, positions)
    caches = (conv_cache, conv_pages_in, conv_pages_out, state_cache, state_pages_in, state_pages_out)
    return attention, *state_update(*ssm, *caches, None if out is None else out[1:])
