"""The context cache of an engine: what it is made from, and what prompts and answers leave in it (§6)."""

import warnings

import numpy as np
import torch
from torch import Tensor

from ..config import EngineConfig, FlexHybridConfig
from ..kernels import SSM
from .cache_tree import Captures
from .context_cache import ContextCache
from .coordination import CostModel, DeviceSpeed
from .memory import PagePool
from .profiling import BranchProfile
from .request import Request
from .tables import RequestTables


def make_cache(
    config: EngineConfig,
    pool: PagePool,
    model_config: FlexHybridConfig,
    dtype: torch.dtype,
    profile: BranchProfile | None,
) -> ContextCache | None:
    """The context cache, or None where it is off. Raises ValueError where it would be larger than the pool.

    profile: tells what reuse saves; without one that is estimated.
    """
    if config.context_cache is None:
        return None
    page_bytes = pool.layout.page_bytes
    if config.cache_bytes is not None and config.cache_bytes > pool.num_pages * page_bytes:
        raise ValueError(
            f"cache_bytes={config.cache_bytes} is larger than the page pool, {pool.num_pages * page_bytes} bytes: "
            "lower it, leave it out for all that is free, or raise memory_bytes"
        )
    capacity = pool.num_pages if config.cache_bytes is None else config.cache_bytes // page_bytes
    if capacity < pool.layout.entry_pages and "attention" not in model_config.layer_routes:
        warnings.warn(
            f"cache_bytes={config.cache_bytes} holds no SSM state ({pool.layout.entry_pages * page_bytes} bytes): "
            "the context cache can never hit",
            stacklevel=3,
        )
    cost_model = CostModel(model_config, dtype, DeviceSpeed.nominal(), profile)
    choices = config.context_cache, config.cache_entries, config.cache_eviction
    return ContextCache(pool, cost_model, *choices, capacity, config.check_integrity)


def publish_prompt(cache: ContextCache, tables: RequestTables, request: Request, keep_gates: bool) -> None:
    """What a prompt that has passed all layers has computed goes into the cache; what it took from there is counted.

    keep_gates: the request keeps the gate rows of its prompt, for `publish_answer`.
    """
    progress = request.progress
    if progress.reuse is None:
        return
    reuse, lowest = progress.reuse, progress.lowest
    request.cached_tokens, request.reused_layers = int(lowest.min()), progress.reused_layers
    request.saved_token_layers = int(lowest.sum())
    hit = progress.reused_layers > 0
    cache.stats.count(lowest, len(request.prompt), reuse.length, progress.computed, hit)
    node = cache.insert(request.tokens)
    kv_pages = tables.kv_pages[:, request.slot]
    cache.publish(node, request.routes, kv_pages, progress.z, reuse.captures, reuse.clock, reuse.length)
    request.looked_up_at = reuse.clock
    reuse.close()
    progress.reuse = None
    if keep_gates:
        request.gate_rows = progress.z


def publish_answer(cache: ContextCache, tables: RequestTables, request: Request, gate_table: Tensor | None) -> None:
    """Prompt and answer of a request that has ended, for the next turn. The last token has not been computed.

    gate_table: `Executor.gate_table`, the gate rows of generated tokens.
    """
    slot, length = request.slot, len(request.prompt) + len(request.output) - 1
    if tables.context[slot] != length or length == len(request.prompt):
        return
    captures = Captures()
    for layer_idx, route in enumerate(request.routes):
        if route == SSM:
            parts = tables.state_pages[layer_idx, slot], tables.conv_pages[layer_idx, slot]
            captures.states[layer_idx] = {length: np.concatenate(parts)}
    gates = {}
    if gate_table is not None:
        count = length - len(request.prompt)
        gates = {i: torch.cat([z, gate_table[slot, :count, i]]) for i, z in request.gate_rows.items()}
    tokens = np.array([*request.prompt, *request.output[:-1]], dtype=np.int32)
    node = cache.insert(tokens)
    kv_pages = tables.kv_pages[:, slot]
    cache.publish(node, request.routes, kv_pages, gates, captures, request.looked_up_at, length, answer=True)
    cache.trim()
