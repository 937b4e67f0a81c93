"""Each operator as one writes it in eager torch, vectorised where that is easy: what the fused forms replace.

Same arguments, results and effects as the operators; sums are in whatever precision torch takes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from flexops.kernels import training


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, n_groups: int) -> Tensor:
    groups = (x * F.silu(gate)).unflatten(-1, (n_groups, -1))
    return F.rms_norm(groups, groups.shape[-1:], None, eps).flatten(-2) * weight


def finish_gated_norm(x: Tensor, sum_squares: Tensor, weight: Tensor, eps: float, n_groups: int) -> Tensor:
    groups = x.unflatten(-1, (n_groups, -1))
    mean = sum_squares.unflatten(-1, (n_groups, -1)).sum(-1) / groups.shape[-1]
    return (groups * torch.rsqrt(mean + eps).unsqueeze(-1)).flatten(-2).to(x.dtype) * weight


def gate_pool(residual: Tensor, delta: Tensor, weight: Tensor, eps: float, w1: Tensor) -> tuple[Tensor, Tensor]:
    residual.add_(delta)
    u = rms_norm(residual, weight, eps)
    return u, F.linear(u, w1).float()


def gate_route(
    z: Tensor, cu_seqlens: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    lengths = cu_seqlens.diff()
    request = torch.repeat_interleave(lengths, output_size=z.shape[0])
    mean = z.new_zeros(len(lengths), z.shape[1]).index_add_(0, request, z) / lengths.unsqueeze(1)
    logits = F.linear(F.silu(mean + b1.float()), w2.float(), b2.float())
    logits[:, 0] += bias
    return logits.softmax(-1), logits.flip(-1).argmax(-1).neg().add(1).int()


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(0, index.clamp(min=0)) * (index >= 0).unsqueeze(1)


def scatter_rows(out: Tensor, x: Tensor, index: Tensor) -> Tensor:
    keep = index >= 0
    out[index[keep].long()] = x[keep]
    return out


def split_norm(residual: Tensor, delta: Tensor, weight: Tensor, eps: float, order: Tensor) -> Tensor:
    named = order[order >= 0].long()
    residual[named] += delta[named]
    return rms_norm(gather_rows(residual, order), weight, eps)


def merge_norm(
    residual: Tensor, y_attention: Tensor, y_ssm: Tensor, inverse: Tensor, weight: Tensor, eps: float
) -> Tensor:
    residual.add_(gather_rows(torch.cat([y_attention, y_ssm]), inverse))
    return rms_norm(residual, weight, eps)


def apply_rope(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    cos, sin = cos_sin[positions].to(x.dtype).unsqueeze(1).chunk(2, dim=-1)
    cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], -1) * sin


def append_kv(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, positions: Tensor, kv_cache: Tensor, slot_mapping: Tensor
) -> Tensor:
    q, k = apply_rope(q, cos_sin, positions), apply_rope(k, cos_sin, positions)
    keep = slot_mapping >= 0
    slots = slot_mapping[keep]
    page, offset = slots // kv_cache.shape[3], slots % kv_cache.shape[3]
    kv_cache[page, 0, :, offset] = k[keep]
    kv_cache[page, 1, :, offset] = v[keep]
    return q


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    scale: float,
    max_query_len: int,
) -> Tensor:
    """The pages of each request gathered, then torch's attention, request by request."""
    outputs = []
    lengths, contexts = cu_seqlens.diff().tolist(), context_lens.tolist()
    for queries, pages, context in zip(q.split(lengths), page_table, contexts, strict=True):
        used = pages[: -(-context // kv_cache.shape[3])]
        keys, values = kv_cache[used].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, None, :, :context]
        count = len(queries)
        mask = torch.ones(count, context, dtype=torch.bool, device=q.device).tril(context - count)
        heads = queries.transpose(0, 1).unsqueeze(0)
        out = F.scaled_dot_product_attention(heads, keys, values, mask, scale=scale, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def _windows(cache: Tensor, pages: Tensor, channels: int) -> Tensor:
    """[R, K, C] of page tables [R, Nc], zeros where the first page is -1."""
    rings = cache[pages.clamp(min=0)].transpose(1, 2).flatten(2)[..., :channels]
    return torch.where((pages[:, :1] >= 0).unsqueeze(-1), rings, 0)


def _put_windows(cache: Tensor, pages: Tensor, windows: Tensor) -> None:
    size = cache.shape[2]
    for i, part in enumerate(windows.split(size, dim=-1)):
        keep = pages[:, i] >= 0
        cache[pages[keep, i].long(), :, : part.shape[-1]] = part[keep]


def _rolled(last: Tensor, end: int) -> Tensor:
    """The last K inputs [K, C], oldest first, as a ring after `end` positions."""
    return last.roll(end, dims=0)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    cu_seqlens: Tensor,
    seq_starts: Tensor,
    conv_cache: Tensor,
    initial_pages: Tensor,
    final_pages: Tensor,
    checkpoint_rows: Tensor,
    checkpoint_pages: Tensor,
) -> Tensor:
    """The window before each sequence put in front of it, then torch's convolution, sequence by sequence."""
    channels, width = weight.shape
    outputs, finals, checkpoints = [], [], []
    rings = _windows(conv_cache, initial_pages, channels)
    first = 0
    for rows, start, ring in zip(x.split(cu_seqlens.diff().tolist()), seq_starts.tolist(), rings, strict=True):
        before = ring.roll(-start, dims=0)
        padded = torch.cat([before, rows])
        out = F.conv1d(padded[1:].T.unsqueeze(0), weight.unsqueeze(1), bias, groups=channels)
        outputs.append(F.silu(out[0].T))
        finals.append(_rolled(padded[-width:], start + len(rows)))
        for row in checkpoint_rows.tolist():
            if first <= row < first + len(rows):
                count = row - first + 1
                checkpoints.append(_rolled(padded[count : count + width], start + count))
        first += len(rows)
    _put_windows(conv_cache, final_pages, torch.stack(finals))
    _put_windows(conv_cache, checkpoint_pages, torch.stack(checkpoints))
    return torch.cat(outputs)


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    seq_starts: Tensor,
    chunk_size: int,
    *_: Tensor,
) -> Tensor:
    """The chunked scan in torch, from empty states and leaving none: less than the operator does."""
    return training.ssd_scan(x, dt, A_log, B, C, D, dt_bias, cu_seqlens, chunk_size)


def state_update(
    xBC: Tensor,
    z: Tensor,
    dt: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    positions: Tensor,
    conv_cache: Tensor,
    conv_pages_in: Tensor,
    conv_pages_out: Tensor,
    state_cache: Tensor,
    state_pages_in: Tensor,
    state_pages_out: Tensor,
) -> tuple[Tensor, Tensor]:
    """Windows and states of all requests gathered, one step, and put back."""
    requests, heads = dt.shape
    width, (dim, d_state) = conv_weight.shape[1], state_cache.shape[2:]
    ring = _windows(conv_cache, conv_pages_in, xBC.shape[1])
    slots = positions.unsqueeze(1) + torch.arange(1, width + 1, device=xBC.device)
    ring[torch.arange(requests, device=xBC.device), positions % width] = xBC
    ordered = ring.gather(1, (slots % width).long().unsqueeze(-1).expand_as(ring))
    conv = F.silu((ordered * conv_weight.T).sum(1) + conv_bias)
    x, B, C = conv.split([heads * dim, *[(conv.shape[1] - heads * dim) // 2] * 2], dim=1)
    x = x.unflatten(1, (heads, dim)).float()
    B, C = (t.unflatten(1, (-1, d_state)).float() for t in (B, C))
    B, C = (t.repeat_interleave(heads // t.shape[1], 1) for t in (B, C))
    present = (state_pages_in[:, 0] >= 0).view(-1, 1, 1, 1)
    state = torch.where(present, state_cache[state_pages_in.clamp(min=0)].flatten(1, 2)[:, :heads], 0)
    step = F.softplus(dt.float() + dt_bias)
    decay = torch.exp(-torch.exp(A_log.float()) * step)
    state = state * decay[..., None, None] + (step.unsqueeze(-1) * x).unsqueeze(-1) * B.unsqueeze(2)
    y = (state * C.unsqueeze(2)).sum(-1) + D.unsqueeze(-1) * x
    gated = y * F.silu(z.float()).view_as(y)
    written = state_pages_out[:, 0] >= 0
    gated = gated * written.view(-1, 1, 1)
    _put_windows(conv_cache, conv_pages_out, ring)
    for i, part in enumerate(state.split(state_cache.shape[1], dim=1)):
        keep = state_pages_out[:, i] >= 0
        state_cache[state_pages_out[keep, i].long(), : part.shape[1]] = part[keep]
    return gated.flatten(1).to(xBC.dtype), gated.square().sum(-1)


def decode_branches(
    q: Tensor, kv_cache: Tensor, page_table: Tensor, context_lens: Tensor, scale: float, *ssm: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One branch after the other."""
    rows = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    return paged_attention(q, kv_cache, page_table, rows, context_lens, scale, 1), *state_update(*ssm)
