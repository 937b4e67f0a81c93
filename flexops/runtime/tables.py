"""What the running requests hold: per slot and layer the route and the pages, as arrays that batches are cut from."""

import numpy as np

from ..kernels import ATTENTION, SSM
from .memory import PagePool

UNKNOWN = -1


class RequestTables:
    """Routes, page tables and context lengths of up to `num_slots` requests.

    routes: int8 [num_layers, slots], -1 while unknown.  context: int32 [slots], tokens in the caches.
    kv_pages: int32 [num_layers, slots, columns], grown as contexts do; state_pages, conv_pages: int32 [num_layers,
    slots, pages of an entry].  scratch: int32 [slots, pages of an entry], a state and window that a prefill overwrites
    while it computes rows of a cached prefix again. Unused entries are -1.  version: int64 [slots], another number
    whenever a slot's routes or pages change other than by `grow`.
    """

    def __init__(self, num_layers: int, num_slots: int, pool: PagePool, poison: bool) -> None:
        self.pool, self.layout, self.poison = pool, pool.layout, poison
        self.num_layers = num_layers
        self.routes = np.full((num_layers, num_slots), UNKNOWN, dtype=np.int8)
        self.context = np.zeros(num_slots, dtype=np.int32)
        self.kv_pages = np.full((num_layers, num_slots, 8), -1, dtype=np.int32)
        self.state_pages = np.full((num_layers, num_slots, self.layout.state_pages), -1, dtype=np.int32)
        self.conv_pages = np.full((num_layers, num_slots, self.layout.conv_pages), -1, dtype=np.int32)
        self.scratch = np.full((num_slots, self.layout.entry_pages), -1, dtype=np.int32)
        self.version = np.zeros(num_slots, dtype=np.int64)
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._reserved = np.zeros((num_layers, num_slots), dtype=np.int32)

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    def pages_for(self, route: int, num_tokens: int) -> int:
        """Pages of one layer for a prompt of num_tokens; the larger of the two routes where it is unknown."""
        kv = self.layout.kv_pages(num_tokens)
        if route == ATTENTION:
            return kv
        return self.layout.entry_pages if route == SSM else max(kv, self.layout.entry_pages)

    def pages_for_all(self, routes: list[int], num_tokens: int) -> int:
        """Pages of all layers; `routes` has a code per layer, -1 unknown."""
        return sum(self.pages_for(route, num_tokens) for route in routes)

    def open(self, routes: list[int], num_tokens: int, scratch: bool = False) -> int:
        """A slot with a reservation for a prompt of num_tokens in every layer. The caller has checked that it fits."""
        slot = self._free_slots.pop()
        self._reserved[:, slot] = [self.pages_for(route, num_tokens) for route in routes]
        self.pool.reserved += int(self._reserved[:, slot].sum())
        self.context[slot] = 0
        if scratch:
            self.scratch[slot] = self.pool.allocate(self.layout.entry_pages)
        return slot

    def enter_layer(
        self, slot: int, layer_idx: int, route: int, num_tokens: int, cached: np.ndarray | None = None, length: int = 0
    ) -> None:
        """Turn the layer's reservation into pages of the route that its gate chose.

        cached: int32, pages of the context cache with the KV of the first `length` tokens; full ones are shared, one
        that will be written on is copied.
        """
        full = 0 if cached is None else length // self.layout.page_tokens
        needed = self.pages_for(route, num_tokens)
        self.pool.reserved -= int(self._reserved[layer_idx, slot]) - (needed - full)
        self._reserved[layer_idx, slot] = 0
        pages = self.pool.allocate(needed - full, reserved=True)
        self.routes[layer_idx, slot] = route
        self.version[slot] += 1
        if route == ATTENTION:
            self._widen(needed)
            self.kv_pages[layer_idx, slot, full:needed] = pages
            if cached is not None:
                self.kv_pages[layer_idx, slot, :full] = cached[:full]
                self.pool.share(cached[:full])
                if length % self.layout.page_tokens:
                    self.pool.copy(cached[full : full + 1], np.array(pages[:1]))
        else:
            self.state_pages[layer_idx, slot] = pages[: self.layout.state_pages]
            self.conv_pages[layer_idx, slot] = pages[self.layout.state_pages :]

    def growth(self, slots: np.ndarray) -> np.ndarray:
        """Pages that each slot needs before its next token is appended."""
        needed = np.zeros(len(slots), dtype=np.int64)
        full = np.flatnonzero(self.context[slots] % self.layout.page_tokens == 0)
        if len(full):
            needed[full] = (self.routes[:, slots[full]] == ATTENTION).sum(0)
        return needed

    def grow(self, slot: int) -> None:
        """The next page for every attention layer of the slot. Raises PoolExhausted and then has changed nothing."""
        layers = np.flatnonzero(self.routes[:, slot] == ATTENTION)
        pages = self.pool.allocate(len(layers))
        column = int(self.context[slot]) // self.layout.page_tokens
        self._widen(column + 1)
        self.kv_pages[layers, slot, column] = pages

    def fork(self, slot: int) -> int | None:
        """A slot that continues from the same caches: full KV pages are shared, what is written on is copied.

        None where slots or pages are short; then nothing has changed.
        """
        attention = np.flatnonzero(self.routes[:, slot] == ATTENTION)
        ssm = np.flatnonzero(self.routes[:, slot] == SSM)
        full, part = divmod(int(self.context[slot]), self.layout.page_tokens)
        partial = self.kv_pages[attention, slot, full] if part else np.empty(0, dtype=np.int32)
        old = np.concatenate([partial, self.state_pages[ssm, slot].ravel(), self.conv_pages[ssm, slot].ravel()])
        if not self._free_slots or self.pool.available < len(old):
            return None
        new = np.array(self.pool.allocate(len(old)), dtype=np.int32)
        self.pool.copy(old, new)
        self.pool.share(self.kv_pages[attention, slot, :full].ravel())
        twin = self._free_slots.pop()
        for table in (self.kv_pages, self.state_pages, self.conv_pages, self.routes):
            table[:, twin] = table[:, slot]
        self.context[twin] = self.context[slot]
        self.version[twin] += 1
        states = len(partial) + self.state_pages[ssm, slot].size
        self.kv_pages[attention[: len(partial)], twin, full] = new[: len(partial)]
        self.state_pages[ssm, twin] = new[len(partial) : states].reshape(self.state_pages[ssm, slot].shape)
        self.conv_pages[ssm, twin] = new[states:].reshape(self.conv_pages[ssm, slot].shape)
        return twin

    def _widen(self, columns: int) -> None:
        have = self.kv_pages.shape[2]
        if columns > have:
            wider = max(columns, 2 * have)
            self.kv_pages = np.pad(self.kv_pages, ((0, 0), (0, 0), (0, wider - have)), constant_values=-1)

    def drop_scratch(self, slot: int) -> None:
        """Give back the scratch state, where the slot has one."""
        pages = self.scratch[slot]
        self.pool.release(pages[pages >= 0], poison=self.poison)
        self.scratch[slot] = -1

    def owned(self, slot: int) -> list[int]:
        """Every page the slot holds."""
        tables = (self.kv_pages[:, slot], self.state_pages[:, slot], self.conv_pages[:, slot], self.scratch[slot])
        return [int(page) for table in tables for page in table[table >= 0]]

    def close(self, slot: int) -> None:
        """Give back the slot's pages, its reservation and the slot."""
        self.pool.release(self.owned(slot), poison=self.poison)
        self.pool.reserved -= int(self._reserved[:, slot].sum())
        self._reserved[:, slot] = 0
        self.routes[:, slot] = UNKNOWN
        for table in (self.kv_pages, self.state_pages, self.conv_pages):
            table[:, slot] = -1
        self.scratch[slot] = -1
        self.version[slot] += 1
        self._free_slots.append(slot)
