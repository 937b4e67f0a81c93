"""Differentiable forms of the sequence operators, batched over sequences and chunks: what training runs.

They compute what `reference.py` defines, from empty states and without caches. Packed rows are padded to
[R, S, ...] (a view where all sequences are equally long), so that no Python loop runs over requests or tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .reference import _acc, softplus


def _lengths(cu_seqlens: Tensor) -> list[int]:
    return cu_seqlens.diff().tolist()


def pad_packed(x: Tensor, cu_seqlens: Tensor, multiple: int = 1) -> Tensor:
    """Packed rows [T, ...] as [R, S, ...], zeros behind each sequence; S is rounded up to a multiple."""
    lengths = _lengths(cu_seqlens)
    longest = -(-max(lengths, default=0) // multiple) * multiple
    if lengths and all(n == longest for n in lengths):
        return x.unflatten(0, (len(lengths), longest))
    return torch.stack([F.pad(rows, (0, 0) * (x.dim() - 1) + (0, longest - len(rows))) for rows in x.split(lengths)])


def unpad_packed(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The inverse of `pad_packed`."""
    lengths = _lengths(cu_seqlens)
    if all(n == x.shape[1] for n in lengths):
        return x.flatten(0, 1)
    return torch.cat([rows[:n] for rows, n in zip(x, lengths, strict=True)])


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """Causal self-attention within each packed sequence (Eq. 1): q [T, Hq, d], k and v [T, Hk, d] -> [T, Hq, d]."""
    q, k, v = (pad_packed(t, cu_seqlens).transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return unpad_packed(out.transpose(1, 2), cu_seqlens)


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """silu(depthwise causal convolution) of each packed sequence from an empty window: [T, C] -> [T, C]."""
    padded = F.pad(pad_packed(x, cu_seqlens).transpose(1, 2), (weight.shape[1] - 1, 0))
    out = F.conv1d(padded, weight.unsqueeze(1), bias, groups=weight.shape[0])
    return unpad_packed(F.silu(out).transpose(1, 2), cu_seqlens).contiguous()


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor,
    chunk_size: int,
) -> Tensor:
    """Mamba-2's scan from empty states in its chunked (state-space dual) form; shapes as in `reference.ssd_scan`.

    Within a chunk of Q tokens the recurrence is a masked matrix product, between chunks it is a recurrence of
    states: every exponent is a sum of dt*A <= 0 over tokens, so nothing overflows.
    """
    num_heads, head_dim = x.shape[1:]
    n_groups, d_state = B.shape[1:]
    step = _acc(dt) if dt_bias is None else _acc(dt) + _acc(dt_bias)
    step = softplus(step)
    xf = pad_packed(_acc(x), cu_seqlens, chunk_size)  # [R, S, H, P]
    # a padded token has dt = 0: it decays nothing and adds nothing
    step = pad_packed(step, cu_seqlens, chunk_size)  # [R, S, H]
    Bf, Cf = (pad_packed(_acc(t), cu_seqlens, chunk_size) for t in (B, C))  # [R, S, G, N]

    def chunked(t: Tensor) -> Tensor:  # [R, S, heads, ...] -> [R, chunks, heads, Q, ...]
        return t.unflatten(1, (-1, chunk_size)).transpose(2, 3)

    xc, dtc, Bc, Cc = chunked(xf), chunked(step), chunked(Bf), chunked(Cf)
    heads = (n_groups, num_heads // n_groups)
    log_decay = -torch.exp(_acc(A_log)).unsqueeze(-1) * dtc  # [R, c, H, Q]
    total = log_decay.cumsum(-1)
    # 1. within chunks: y_t = sum_{s<=t} exp(total_t - total_s) (C_t . B_s) dt_s x_s
    later = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=x.device).triu(1)
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
    scores = (Cc @ Bc.transpose(-1, -2)).unsqueeze(3) * decay.unflatten(2, heads)  # [R, c, G, H/G, Q, Q]
    inputs = dtc.unsqueeze(-1) * xc  # [R, c, H, Q, P]
    y = scores.flatten(2, 3) @ inputs
    # 2. what each chunk adds to the state at its end
    weighted = ((total[..., -1:] - total).exp().unsqueeze(-1) * inputs).unflatten(2, heads)
    added = (weighted.transpose(-1, -2) @ Bc.unsqueeze(3)).flatten(2, 3)  # [R, c, H, P, N]
    # 3. the state before each chunk, then its share of the outputs
    state = xf.new_zeros(xf.shape[0], num_heads, head_dim, d_state)
    before = []
    for c in range(added.shape[1]):
        before.append(state)
        state = state * total[:, c, :, -1].exp()[..., None, None] + added[:, c]
    if before:
        states = torch.stack(before, 1).unflatten(2, heads)
        carried = Cc.unsqueeze(3) @ states.transpose(-1, -2)  # [R, c, G, H/G, Q, P]
        y = y + carried.flatten(2, 3) * total.exp().unsqueeze(-1)
    y = y.transpose(2, 3).flatten(1, 2)
    if D is not None:
        y = y + _acc(D).unsqueeze(-1) * xf
    longest = max(_lengths(cu_seqlens), default=0)
    return unpad_packed(y[:, :longest], cu_seqlens).to(x.dtype)
