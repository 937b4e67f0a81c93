"""One pool of equal pages for everything that is kept between steps: KV, SSM states, conv windows (§7, after Jenga).

A page is the smallest power of two that holds one SSM head's fp32 state and 16 tokens of one layer's KV, so no kind
of data needs a pool of its own and any mix of routes can fill the memory. Pages of one allocation are contiguous
where a run is free.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..config import FlexHybridConfig

MIN_PAGE_TOKENS = 16
CACHE_LINE = 64


class PoolExhausted(Exception):
    """Fewer pages are free than were asked for."""


@dataclass(frozen=True)
class PageLayout:
    """How each kind of data lies in pages of one size.

    KV page: [2, num_kv_heads, page_tokens, head_dim] of one layer.  State page: [heads_per_page, head_dim, d_state]
    fp32.  Conv page: [d_conv, channels_per_page], a ring by absolute position. A state entry is `state_pages` pages
    and its conv window `conv_pages` more.  Hidden page: [hidden_tokens, hidden_size], 0 where no row fits a page.
    """

    page_bytes: int
    page_tokens: int
    hidden_tokens: int
    heads_per_page: int
    channels_per_page: int
    state_pages: int
    conv_pages: int
    kv_waste: float
    state_waste: float

    @classmethod
    def of(cls, config: FlexHybridConfig, dtype: torch.dtype) -> "PageLayout":
        """The layout for a model's shapes and the dtype of its activations."""
        token_bytes = 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize
        head_bytes = config.mamba_d_head * config.mamba_d_state * 4
        largest = max(
            MIN_PAGE_TOKENS * token_bytes if _only_route(config) != "ssm" else 0,
            head_bytes if _only_route(config) != "attention" else 0,
        )
        page_bytes = 1 << (largest - 1).bit_length()
        heads = max(1, min(config.mamba_n_heads, page_bytes // head_bytes))
        channels = min(config.conv_dim, page_bytes // (config.mamba_d_conv * dtype.itemsize))
        page_tokens = max(1, page_bytes // token_bytes)
        state_pages, conv_pages = -(-config.mamba_n_heads // heads), -(-config.conv_dim // channels)
        state_bytes = config.mamba_n_heads * head_bytes + config.conv_dim * config.mamba_d_conv * dtype.itemsize
        return cls(
            page_bytes=page_bytes,
            page_tokens=page_tokens,
            hidden_tokens=page_bytes // (config.hidden_size * dtype.itemsize),
            heads_per_page=heads,
            channels_per_page=channels,
            state_pages=state_pages,
            conv_pages=conv_pages,
            kv_waste=1 - page_tokens * token_bytes / page_bytes,
            state_waste=1 - state_bytes / ((state_pages + conv_pages) * page_bytes),
        )

    @property
    def entry_pages(self) -> int:
        """Pages of one SSM state with its conv window."""
        return self.state_pages + self.conv_pages

    def kv_pages(self, num_tokens: int) -> int:
        """Pages of one attention layer's KV for so many tokens."""
        return -(-num_tokens // self.page_tokens)


def _only_route(config: FlexHybridConfig) -> str | None:
    """The route that every layer is fixed to, or None."""
    routes = set(config.layer_routes)
    return routes.pop() if len(routes) == 1 and "adaptive" not in routes else None


class FreeRuns:
    """Free page numbers as maximal runs, so that allocations are contiguous where they can be."""

    def __init__(self, num_pages: int) -> None:
        self.count = num_pages
        self._length: dict[int, int] = {}  # start of a run -> its length
        self._start: dict[int, int] = {}  # page behind a run -> its start
        self._by_size: dict[int, set[int]] = {}  # bit length of the run's length -> starts
        self._add(0, num_pages)

    def _add(self, start: int, length: int) -> None:
        self._length[start] = length
        self._start[start + length] = start
        self._by_size.setdefault(length.bit_length(), set()).add(start)

    def _remove(self, start: int) -> int:
        length = self._length.pop(start)
        del self._start[start + length]
        bucket = self._by_size[length.bit_length()]
        bucket.discard(start)
        if not bucket:
            del self._by_size[length.bit_length()]
        return length

    def take(self, n: int) -> list[int]:
        """n page numbers, one run if a bucket of long enough runs has any, else the longest runs first."""
        pages: list[int] = []
        while len(pages) < n:
            wanted = n - len(pages)
            sizes = [size for size in self._by_size if size > wanted.bit_length()]
            start = None
            if not sizes and wanted.bit_length() in self._by_size:  # same bucket: some of its runs may be long enough
                start = next((s for s in self._by_size[wanted.bit_length()] if self._length[s] >= wanted), None)
            if start is None:
                start = next(iter(self._by_size[min(sizes) if sizes else max(self._by_size)]))
            length = self._remove(start)
            taken = min(wanted, length)
            pages.extend(range(start, start + taken))
            if taken < length:
                self._add(start + taken, length - taken)
        self.count -= n
        return pages

    def give(self, start: int, length: int) -> None:
        """A run of pages back, joined with the free runs beside it."""
        self.count += length
        if start + length in self._length:
            length += self._remove(start + length)
        if start in self._start:
            start = self._start[start]
            length += self._remove(start)
        self._add(start, length)

    def pages(self) -> list[int]:
        """Every free page, in no order."""
        return [page for start, length in self._length.items() for page in range(start, start + length)]


class PagePool:
    """Pages with reference counts, and views of their memory as caches.

    A page is free (count 0) or held by `count` owners; `allocate` gives pages with count 1, `share` adds an owner,
    `release` removes one. `reserve` keeps pages from being promised twice without naming them: reserved pages are
    not `available`, and their owner allocates from what he reserved.
    """

    def __init__(
        self, num_pages: int, layout: PageLayout, config: FlexHybridConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_pages = num_pages
        self.layout = layout
        self.reserved = 0
        self.ref_counts = np.zeros(num_pages, dtype=np.int32)
        self._free = FreeRuns(num_pages)
        self.memory = _zeros(num_pages, layout.page_bytes, device)
        typed, floats = self.memory.view(dtype), self.memory.view(torch.float32)
        kv_heads, head_dim, tokens = config.num_key_value_heads, config.head_dim, layout.page_tokens
        self.kv_cache = _view(typed, (2, kv_heads, tokens, head_dim))
        state = (layout.heads_per_page, config.mamba_d_head, config.mamba_d_state)
        self.state_cache = _view(floats, state)
        self.conv_cache = _view(typed, (config.mamba_d_conv, layout.channels_per_page))
        self.hidden_cache = _view(typed, (max(1, layout.hidden_tokens), config.hidden_size))

    @property
    def available(self) -> int:
        """Free pages that nobody has reserved."""
        return self._free.count - self.reserved

    @property
    def free(self) -> int:
        """Free pages, reserved ones included."""
        return self._free.count

    def allocate(self, n: int, reserved: bool = False) -> list[int]:
        """n pages with one owner each; `reserved` takes them from what the caller has reserved.

        Raises PoolExhausted, and then has changed nothing.
        """
        if n > (self.free if reserved else self.available):
            raise PoolExhausted(f"{n} pages wanted, {self.available} available of {self.num_pages}")
        if reserved:
            assert self.reserved >= n, "allocated from a reservation that was never made"
            self.reserved -= n
        pages = self._free.take(n)
        self.ref_counts[pages] = 1
        return pages

    def share(self, pages: list[int] | np.ndarray) -> None:
        """One more owner for each of some different pages."""
        assert (self.ref_counts[pages] > 0).all(), "shared a free page"
        self.ref_counts[pages] += 1

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        """Contents of pages to as many other pages."""
        device = self.memory.device
        old, new = (torch.from_numpy(pages.astype(np.int64)).to(device) for pages in (source, target))
        self.memory.index_copy_(0, new, self.memory.index_select(0, old))

    def release(self, pages: list[int] | np.ndarray, poison: bool = False) -> None:
        """One owner less for each of some different pages; pages without one are free.

        poison: fill those with NaN bytes.
        """
        given = np.asarray(pages, dtype=np.int64)
        assert (self.ref_counts[given] > 0).all(), "released a free page"
        self.ref_counts[given] -= 1
        freed = np.sort(given[self.ref_counts[given] == 0])
        if poison and len(freed):
            self.memory[torch.from_numpy(freed)] = 0xFF
        if len(freed):
            firsts = np.flatnonzero(np.diff(freed, prepend=-2) != 1)
            lengths = np.diff(firsts, append=len(freed))
            for start, length in zip(freed[firsts].tolist(), lengths.tolist(), strict=True):
                self._free.give(start, length)

    def check_integrity(self, owned: list[int]) -> None:
        """Prove that every page is free or owned as often as it is counted. owned: all owners' pages, repeated."""
        counted = np.bincount(np.asarray(owned, dtype=np.int64), minlength=self.num_pages)
        assert (counted == self.ref_counts).all(), "page counts differ from what requests and cache hold"
        free = self._free.pages()
        assert len(free) == len(set(free)) == self.free, "the free list holds a page twice"
        assert (self.ref_counts[free] == 0).all(), "a free page has an owner"
        assert self.free + int((self.ref_counts > 0).sum()) == self.num_pages, "a page is lost"
        assert 0 <= self.reserved <= self.free, "more is reserved than is free"


def _zeros(num_pages: int, page_bytes: int, device: torch.device) -> Tensor:
    """The pool's memory, uint8 [num_pages, page_bytes]. On the CPU the system maps a page when it is first written."""
    if device.type != "cpu":
        return torch.zeros(num_pages, page_bytes, dtype=torch.uint8, device=device)
    memory = torch.from_numpy(np.zeros(num_pages * page_bytes + CACHE_LINE, dtype=np.uint8))
    start = -memory.data_ptr() % CACHE_LINE
    return memory[start : start + num_pages * page_bytes].view(num_pages, page_bytes)


def _view(pages: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The head of every page as an array of this shape; pages too small for one (an unused kind) give no rows."""
    size = int(np.prod(shape))
    if size > pages.shape[1]:
        return pages.new_empty(0, *shape)
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.insert(0, step)
        step *= extent
    return pages.as_strided((pages.shape[0], *shape), (pages.shape[1], *strides))
