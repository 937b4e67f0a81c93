"""One call of every operator, as a model makes it: used by the tests of the public face, on the GPU, and by bench/.

`call(case, size, ...)` gives the operator's name and its positional arguments. Requests are ragged, activations are
slices of wider projections, pages lie scattered in one pool each with NaN where nothing valid is, and page and row
tables hold -1.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 1e-5


@dataclass(frozen=True)
class Size:
    """Sizes of one call: a batch of prefills, with tokens in the cache before them, and as many decodes."""

    lengths: tuple[int, ...]
    cached: tuple[int, ...]
    hidden: int
    ffn: int
    q_heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    ssm_heads: int
    ssm_head_dim: int
    groups: int
    d_state: int
    d_conv: int = 4
    gate_dim: int = 16
    chunk_size: int = 64
    heads_per_page: int = 2
    page_gap: int = 16  # elements between pages of a pool

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def requests(self) -> int:
        return len(self.lengths)

    @property
    def d_inner(self) -> int:
        return self.ssm_heads * self.ssm_head_dim

    @property
    def conv_channels(self) -> int:
        return self.d_inner + 2 * self.groups * self.d_state


TINY = Size(
    lengths=(5, 1, 18),
    cached=(3, 0, 16),
    hidden=48,
    ffn=40,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    page_tokens=16,
    ssm_heads=4,
    ssm_head_dim=8,
    groups=2,
    d_state=16,
    chunk_size=16,
)


class Maker:
    """Tensors of one size, dtype and device, the same for the same seed."""

    def __init__(self, size: Size, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.size, self.dtype, self.device = size, dtype, device
        self.generator = torch.Generator(device).manual_seed(seed)

    def randn(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        x = torch.randn(*shape, generator=self.generator, device=self.device) * scale
        return x.to(dtype or self.dtype)

    def slice(self, rows: int, *shape: int) -> Tensor:
        """[rows, *shape] in the middle of a wider matrix, as a fused projection hands it on."""
        width = torch.Size(shape).numel()
        return self.randn(rows, width + 16)[:, 8 : 8 + width].unflatten(1, shape)

    def ints(self, values, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def permutation(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self.generator, device=self.device)

    def pages(self, num_pages: int, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A cache [num_pages, *shape] with gaps between its pages, all NaN."""
        width = torch.Size(shape).numel()
        pool = torch.full(
            (num_pages, width + self.size.page_gap), float("nan"), dtype=dtype or self.dtype, device=self.device
        )
        return pool[:, :width].unflatten(1, shape)

    def cu_seqlens(self) -> Tensor:
        return self.ints([0, *torch.tensor(self.size.lengths).cumsum(0).tolist()])

    def positions(self) -> Tensor:
        """Absolute position of each packed row."""
        rows = [torch.arange(c, c + n) for c, n in zip(self.size.cached, self.size.lengths, strict=True)]
        return torch.cat(rows).to(self.device, torch.int32)

    def cos_sin(self, length: int) -> Tensor:
        half = self.size.head_dim // 2
        angles = torch.arange(length).unsqueeze(1) / 10000 ** (torch.arange(half) / half)
        return torch.cat([angles.cos(), angles.sin()], 1).to(self.device)

    def page_table(self, contexts: list[int]) -> tuple[Tensor, int]:
        """int32 [R, pages] of scattered pages for these contexts, -1 behind them, and the number of pages."""
        counts = [-(-n // self.size.page_tokens) for n in contexts]
        total = sum(counts) + 2
        order = self.permutation(total).tolist()
        table = torch.full((len(counts), max(counts) + 1), -1, dtype=torch.int32)
        for r, count in enumerate(counts):
            table[r, :count] = torch.tensor(order[:count])
            order = order[count:]
        return table.to(self.device), total

    def filled_kv_cache(self, contexts: list[int]) -> tuple[Tensor, Tensor]:
        """A cache whose valid tokens are random and the rest NaN, and its page table."""
        s = self.size
        table, total = self.page_table(contexts)
        cache = self.pages(total, 2, s.kv_heads, s.page_tokens, s.head_dim)
        for pages, context in zip(table.tolist(), contexts, strict=True):
            for i, page in enumerate(p for p in pages if p >= 0):
                valid = min(context - i * s.page_tokens, s.page_tokens)
                cache[page, :, :, :valid] = self.randn(2, s.kv_heads, valid, s.head_dim)
        return cache, table

    def entries(self, count: int, *shape: int, need: int, dtype: torch.dtype | None = None):
        """A cache of states or windows and three tables [count, pages]: filled, to be written, in place of the first.

        The first request has no entry to read (-1).
        """
        pages_each = -(-need // shape[0 if len(shape) == 3 else 1])
        cache = self.pages(3 * count * pages_each + 1, *shape, dtype=dtype)
        order = self.permutation(cache.shape[0])[: 2 * count * pages_each].to(torch.int32)
        read, written = order.view(2, count, pages_each)
        cache[read.flatten().long()] = self.randn(read.numel(), *shape, dtype=dtype)
        read = read.clone()
        read[0] = -1
        return cache, read, written.contiguous()


# --- one function per case: the operator's positional arguments -----------------------------------------------


def _rms_norm(m: Maker):
    return m.slice(m.size.tokens, m.size.hidden), m.randn(m.size.hidden), EPS


def _silu_mul(m: Maker):
    both = m.randn(m.size.tokens, 2 * m.size.ffn)
    return both[:, : m.size.ffn], both[:, m.size.ffn :]


def _gated_rms_norm(m: Maker):
    s = m.size
    return m.slice(s.tokens, s.d_inner), m.slice(s.tokens, s.d_inner), m.randn(s.d_inner), EPS, s.groups


def _finish_gated_norm(m: Maker):
    s = m.size
    x = m.randn(s.requests, s.d_inner)
    sums = x.float().unflatten(1, (s.ssm_heads, -1)).square().sum(-1)
    return x, sums, m.randn(s.d_inner), EPS, s.groups


def _gate_pool(m: Maker):
    s = m.size
    w1 = m.randn(s.gate_dim, s.hidden, scale=s.hidden**-0.5)
    return m.randn(s.tokens, s.hidden), m.randn(s.tokens, s.hidden), m.randn(s.hidden), EPS, w1


def _gate_route(m: Maker):
    e = m.size.gate_dim
    z = m.randn(m.size.tokens, e, dtype=torch.float32)
    return z, m.cu_seqlens(), m.randn(e), m.randn(2, e), m.randn(2), m.randn(m.size.requests, dtype=torch.float32)


def _order(m: Maker) -> Tensor:
    """Two thirds of the rows, in no order, with one -1."""
    order = m.permutation(m.size.tokens)[: 2 * m.size.tokens // 3].to(torch.int32)
    order[len(order) // 2] = -1
    return order


def _gather_rows(m: Maker):
    return m.slice(m.size.tokens, m.size.hidden), _order(m)


def _scatter_rows(m: Maker):
    order = _order(m)
    return m.randn(m.size.tokens, m.size.hidden), m.randn(len(order), m.size.hidden), order


def _split_norm(m: Maker):
    s = m.size
    return m.randn(s.tokens, s.hidden), m.randn(s.tokens, s.hidden), m.randn(s.hidden), EPS, _order(m)


def _merge_norm(m: Maker):
    s = m.size
    order = _order(m)
    inverse = torch.full((s.tokens,), -1, dtype=torch.int32, device=m.device)
    named = order >= 0
    inverse[order[named].long()] = torch.arange(len(order), dtype=torch.int32, device=m.device)[named]
    cut = len(order) // 2
    y_attention, y_ssm = m.randn(cut, s.hidden), m.randn(len(order) - cut, s.hidden)
    return m.randn(s.tokens, s.hidden), y_attention, y_ssm, inverse, m.randn(s.hidden), EPS


def _apply_rope(m: Maker):
    s = m.size
    return m.slice(s.tokens, s.q_heads, s.head_dim), m.cos_sin(max(s.lengths) + max(s.cached)), m.positions()


def _append_kv(m: Maker):
    s = m.size
    heads = m.randn(s.tokens, (s.q_heads + 2 * s.kv_heads) * s.head_dim).unflatten(1, (-1, s.head_dim))
    q, k, v = heads.split([s.q_heads, s.kv_heads, s.kv_heads], dim=1)
    table, total = m.page_table([c + n for c, n in zip(s.cached, s.lengths, strict=True)])
    cache = m.pages(total, 2, s.kv_heads, s.page_tokens, s.head_dim)
    positions = m.positions().long()
    request = torch.repeat_interleave(torch.arange(s.requests), torch.tensor(s.lengths)).to(m.device)
    slots = table.long()[request, positions // s.page_tokens] * s.page_tokens + positions % s.page_tokens
    slots[1] = -1
    cos_sin = m.cos_sin(max(s.lengths) + max(s.cached))
    return q, k, v, cos_sin, positions.int(), cache, slots


def _paged_attention(m: Maker):
    s = m.size
    contexts = [c + n for c, n in zip(s.cached, s.lengths, strict=True)]
    cache, table = m.filled_kv_cache(contexts)
    q = m.slice(s.tokens, s.q_heads, s.head_dim)
    return q, cache, table, m.cu_seqlens(), m.ints(contexts), s.head_dim**-0.5, max(s.lengths)


def _paged_attention_decode(m: Maker):
    s = m.size
    contexts = [c + n for c, n in zip(s.cached, s.lengths, strict=True)]
    cache, table = m.filled_kv_cache(contexts)
    q = m.slice(s.requests, s.q_heads, s.head_dim)
    return q, cache, table, m.ints(range(s.requests + 1)), m.ints(contexts), s.head_dim**-0.5, 1


def _checkpoint(m: Maker, cache: Tensor, taken: Tensor) -> tuple[Tensor, Tensor]:
    """One checkpoint in the last request, at the end of its first chunk, on pages that no table names."""
    s = m.size
    start, position = sum(s.lengths[:-1]), s.cached[-1]
    row = start + (position // s.chunk_size + 1) * s.chunk_size - 1 - position
    assert row < s.tokens, "the last request must reach the end of a chunk"
    used = set(taken.flatten().tolist())
    free = [p for p in range(cache.shape[0]) if p not in used][: taken.shape[1]]
    return m.ints([row]), m.ints([free])


def _causal_conv1d(m: Maker):
    s = m.size
    cache, read, written = m.entries(s.requests, s.d_conv, s.conv_channels // 2 + 4, need=s.conv_channels)
    checkpoint = _checkpoint(m, cache, torch.cat([read, written]))
    weight, bias = m.randn(s.conv_channels, s.d_conv, scale=0.5), m.randn(s.conv_channels)
    x = m.slice(s.tokens, s.conv_channels)
    return x, weight, bias, m.cu_seqlens(), m.ints(s.cached), cache, read, written, *checkpoint


def _ssm_weights(m: Maker) -> tuple[Tensor, Tensor, Tensor]:
    """A_log, D, dt_bias as a fresh Mamba-2 has them."""
    h = m.size.ssm_heads
    a_log = torch.linspace(1, 16, h, device=m.device).log()
    return a_log, m.randn(h, dtype=torch.float32), m.randn(h, dtype=torch.float32, scale=0.5) - 3


def _ssd_scan(m: Maker):
    s = m.size
    shape = (s.heads_per_page, s.ssm_head_dim, s.d_state)
    cache, read, written = m.entries(s.requests, *shape, need=s.ssm_heads, dtype=torch.float32)
    checkpoint = _checkpoint(m, cache, torch.cat([read, written]))
    xBC = m.slice(s.tokens, s.conv_channels)
    x, B, C = xBC.split([s.d_inner, s.groups * s.d_state, s.groups * s.d_state], dim=1)
    x, B, C = x.unflatten(1, (s.ssm_heads, -1)), B.unflatten(1, (s.groups, -1)), C.unflatten(1, (s.groups, -1))
    a_log, D, dt_bias = _ssm_weights(m)
    dt = m.slice(s.tokens, s.ssm_heads)
    starts = m.ints(s.cached)
    return x, dt, a_log, B, C, D, dt_bias, m.cu_seqlens(), starts, s.chunk_size, cache, read, written, *checkpoint


def _state_update(m: Maker):
    s = m.size
    conv_cache, conv_in, conv_out = m.entries(s.requests, s.d_conv, s.conv_channels // 2 + 4, need=s.conv_channels)
    shape = (s.heads_per_page, s.ssm_head_dim, s.d_state)
    state_cache, state_in, state_out = m.entries(s.requests, *shape, need=s.ssm_heads, dtype=torch.float32)
    conv_out[1], state_out[1] = -1, -1
    projection = m.randn(s.requests, s.d_inner + s.conv_channels + s.ssm_heads)
    z, xBC, dt = projection.split([s.d_inner, s.conv_channels, s.ssm_heads], dim=1)
    a_log, D, dt_bias = _ssm_weights(m)
    weight, bias = m.randn(s.conv_channels, s.d_conv, scale=0.5), m.randn(s.conv_channels)
    positions = m.ints([c + n for c, n in zip(s.cached, s.lengths, strict=True)])
    caches = (conv_cache, conv_in, conv_out, state_cache, state_in, state_out)
    return xBC, z, dt, weight, bias, a_log, D, dt_bias, positions, *caches


def _decode_branches(m: Maker):
    q, cache, table, _, contexts, scale, _ = _paged_attention_decode(m)
    return q, cache, table, contexts, scale, *_state_update(m)


_CASES: dict[str, tuple[Callable[[Maker], tuple], tuple[int, ...]]] = {
    "rms_norm": (_rms_norm, ()),
    "silu_mul": (_silu_mul, ()),
    "gated_rms_norm": (_gated_rms_norm, ()),
    "finish_gated_norm": (_finish_gated_norm, ()),
    "gate_pool": (_gate_pool, (0,)),
    "gate_route": (_gate_route, ()),
    "gather_rows": (_gather_rows, ()),
    "scatter_rows": (_scatter_rows, (0,)),
    "split_norm": (_split_norm, (0,)),
    "merge_norm": (_merge_norm, (0,)),
    "apply_rope": (_apply_rope, ()),
    "append_kv": (_append_kv, (5,)),
    "paged_attention": (_paged_attention, ()),
    "paged_attention_decode": (_paged_attention_decode, ()),
    "causal_conv1d": (_causal_conv1d, (5,)),
    "ssd_scan": (_ssd_scan, (10,)),
    "state_update": (_state_update, (9, 12)),
    "decode_branches": (_decode_branches, (14, 17)),
}
CASES = tuple(_CASES)


def operator(case: str) -> str:
    """The operator that a case calls."""
    return case.removesuffix("_decode")


def mutated(case: str) -> tuple[int, ...]:
    """Positions of the arguments that the operator writes."""
    return _CASES[case][1]


def arguments(
    case: str,
    size: Size = TINY,
    dtype: torch.dtype = torch.float32,
    device: torch.device = torch.device("cpu"),
    seed: int = 0,
) -> tuple:
    """The positional arguments of one call."""
    return _CASES[case][0](Maker(size, dtype, device, seed))
