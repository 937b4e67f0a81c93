"""Taking the profile of a model's layers: packed layers over a real page pool, as the executor runs them (§5.2).

The same code runs on a GPU and on a CPU. Batches are drawn over requests, prompt lengths and cached tokens; runs are
interleaved, each batch once per round in an order of its own, so that a slow moment of the machine meets all of them
and medians stay clean.
"""

import statistics
import time
from collections.abc import Callable
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from ..kernels import ATTENTION, SSM, dispatch
from ..models.packed import AttentionBatch, PackedAttention, PackedLayer, PackedMamba2, PackedModel, SSMBatch
from .memory import PageLayout, PagePool
from .profiling import FFN, BranchLoad, BranchProfile, Sample, fit, profile_key


def draw_loads(
    count: int, max_requests: int, max_tokens: int, max_context: int, rng: np.random.Generator
) -> list[BranchLoad]:
    """Batches that cover what a branch meets: decodes alone (half), prefills alone (a quarter), both.

    Request counts, prompt lengths and contexts are drawn evenly on a logarithmic scale: up to max_requests requests,
    max_tokens prompt tokens together, max_context cached tokens each. Half of the prefills start behind cached tokens.
    """

    def drawn(most: int) -> int:
        return int(np.exp(rng.uniform(0, np.log(most + 1))))

    loads = []
    for i in range(count):
        decodes = [drawn(max_context) for _ in range(drawn(max_requests))] if i % 4 != 1 else []
        prefills: list[tuple[int, int]] = []
        if i % 4 in (1, 3):
            total, ranges = max(2, drawn(max_tokens)), drawn(min(4, max_requests))
            rows = max(2, total // ranges)
            prefills = [(rows, int(rng.integers(0, 2)) * drawn(max_context)) for _ in range(ranges)]
        loads.append(BranchLoad.of(decodes, prefills))
    return loads


class BranchRunner:
    """One model's branches, and what follows them, over a page pool of its own, to be run on any load.

    The layers take turns, so that weights come from where they come from when all layers run.
    """

    def __init__(self, model: PackedModel, loads: list[BranchLoad]) -> None:
        """A pool that holds the largest of the loads, with numbers in all of its pages."""
        self.model = model
        self.device, self.dtype = model.embedding.device, model.embedding.dtype
        self.ops = dispatch.select(self.device)
        self.layout = PageLayout.of(model.config, self.dtype)
        requests = max(len(load.counts) for load in loads)
        kv = max(sum(self.layout.kv_pages(int(n)) for n in load.starts + load.counts) for load in loads)
        states = requests * self.layout.entry_pages
        self.pool = PagePool(kv + states, self.layout, model.config, self.dtype, self.device)
        self.kv_pages = self.pool.allocate(kv)
        entries = np.array(self.pool.allocate(states), dtype=np.int32).reshape(requests, self.layout.entry_pages)
        self.state_pages, self.conv_pages = np.split(entries, [self.layout.state_pages], axis=1)
        # memory that was never written is one shared page of zeros on a CPU, and reads too fast
        self.pool.memory.zero_()
        for page in self.kv_pages if self.pool.kv_cache.numel() else ():
            self.pool.kv_cache[page].normal_()
        attention = [layer.attention for layer in model.layers if layer.attention is not None]
        ssm = [layer.ssm for layer in model.layers if layer.ssm is not None]
        ffn = [layer for layer in model.layers if layer.ffn is not None]
        self._attention, self._ssm, self._ffn = cycle(attention), cycle(ssm), cycle(ffn)
        self.parts = [part for part, found in ((ATTENTION, attention), (SSM, ssm), (FFN, ffn)) if found]

    def prepare(self, part: int, load: BranchLoad) -> Callable[[], Tensor]:
        """A call that runs the load in the next layer that has the part; its tensors are made here.

        FFN is what a layer does behind its branches: the merge with the norm, and the feed-forward network.
        """
        generator = torch.Generator(self.device).manual_seed(load.tokens)
        hidden = torch.randn(
            load.tokens, self.model.config.hidden_size, generator=generator, device=self.device, dtype=self.dtype
        )
        if part == FFN:
            split = load.tokens // 2
            nothing = torch.zeros_like(hidden)  # to be added, so that rows do not grow with every run
            order = torch.arange(load.tokens, dtype=torch.int32, device=self.device)

            def run_ffn() -> Tensor:
                layer: PackedLayer = next(self._ffn)
                assert layer.ffn is not None and layer.ffn_norm is not None, "picked for having them"
                branches, norm = (nothing[:split], nothing[split:]), layer.ffn_norm
                return layer.ffn(self.ops.merge_norm(hidden, *branches, order, norm, self.model.eps), self.ops)

            return run_ffn
        if part == ATTENTION:
            attention_batch = self._attention_batch(load)

            def run_attention() -> Tensor:
                branch: PackedAttention = next(self._attention)
                return branch(hidden, attention_batch, self.model.cos_sin, self.pool.kv_cache, self.ops)

            return run_attention
        ssm_batch = self._ssm_batch(load)

        def run_ssm() -> Tensor:
            branch: PackedMamba2 = next(self._ssm)
            return branch(hidden, ssm_batch, self.pool.state_cache, self.pool.conv_cache, self.ops)

        return run_ssm

    def _attention_batch(self, load: BranchLoad) -> AttentionBatch:
        tokens = self.layout.page_tokens
        context, prefills = load.starts + load.counts, load.counts[load.num_decodes :]
        pages = [self.layout.kv_pages(int(n)) for n in context]
        table = np.full((len(pages), max(pages)), -1, dtype=np.int32)
        taken = 0
        for row, count in enumerate(pages):
            table[row, :count] = self.kv_pages[taken : taken + count]
            taken += count
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(load.starts, load.counts, strict=True)])
        owner = np.repeat(np.arange(len(pages)), load.counts)
        slots = table[owner, positions // tokens].astype(np.int64) * tokens + positions % tokens
        return AttentionBatch(
            positions=self._ints(positions),
            slot_mapping=torch.from_numpy(slots).to(self.device),
            page_table=self._ints(table),
            cu_seqlens=self._ints(np.concatenate([[0], load.counts.cumsum()])),
            context_lens=self._ints(context),
            num_decodes=load.num_decodes,
            max_prefill=int(prefills.max(initial=0)),
            prefill_cu_seqlens=self._ints(np.concatenate([[0], prefills.cumsum()])) if len(prefills) else None,
        )

    def _ssm_batch(self, load: BranchLoad) -> SSMBatch:
        n, requests = load.num_decodes, len(load.counts)
        starts = load.starts[n:]
        state_pages, conv_pages = self.state_pages[:requests], self.conv_pages[:requests]
        fresh = (starts == 0)[:, None]
        return SSMBatch(
            num_decodes=n,
            positions=self._ints(load.starts[:n]),
            state_pages=self._ints(state_pages),
            conv_pages=self._ints(conv_pages),
            cu_seqlens=self._ints(np.concatenate([[0], load.counts[n:].cumsum()])),
            seq_starts=self._ints(starts),
            initial_state_pages=self._ints(np.where(fresh, -1, state_pages[n:])),
            initial_conv_pages=self._ints(np.where(fresh, -1, conv_pages[n:])),
        )

    def _ints(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32)).to(self.device)


def time_us(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Microseconds of one call, and by the clock on the wall; on a GPU both are between two events of its stream.

    The first is, where torch has one thread, that thread's own time, which other programs on its core do not lengthen.
    """
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        us = start.elapsed_time(end) * 1e3
        return us, us
    wall, own = time.perf_counter(), time.thread_time()
    run()
    own, wall = (time.thread_time() - own) * 1e6, (time.perf_counter() - wall) * 1e6
    return (own if torch.get_num_threads() == 1 else wall), wall


def measure(
    model: PackedModel,
    loads: list[BranchLoad],
    rounds: int,
    budget_s: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Sample]:
    """Time each part of the model's layers on each load.

    rounds: runs of each batch, in interleaved rounds; after the third, no more than budget_s seconds.
    progress: told (rounds done, rounds in all) after each.
    """
    runner = BranchRunner(model, loads)
    cases = [(part, load) for part in runner.parts for load in loads]
    calls = [runner.prepare(part, load) for part, load in cases]
    times: list[list[tuple[float, float]]] = [[] for _ in cases]
    order = np.arange(len(cases))
    rng = np.random.default_rng(0)
    begin = time.perf_counter()
    with torch.inference_mode():
        for call in calls:
            call()  # compiles
        for done in range(rounds):
            if done >= 3 and time.perf_counter() - begin > budget_s:
                break
            rng.shuffle(order)
            for i in order:
                times[i].append(time_us(calls[i], runner.device))
            progress(done + 1, rounds)
    samples = []
    for (part, load), runs in zip(cases, times, strict=True):
        own, wall = ([run[i] for run in runs] for i in range(2))
        samples.append(Sample(part, load, statistics.median(own), _spread(own), statistics.median(wall), _spread(wall)))
    return samples


def _spread(runs: list[float]) -> float:
    """The middle half of the runs over their median."""
    low, middle, high = np.quantile(runs, [0.25, 0.5, 0.75])
    return float((high - low) / middle)


def profile_model(
    model: PackedModel,
    max_context: int,
    batches: int = 160,
    max_requests: int = 16,
    max_tokens: int = 512,
    rounds: int = 25,
    budget_s: float = 60.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> BranchProfile:
    """Measure the parts of a model's layers on its device and fit their cost model (§5.2).

    max_context: tokens that a request may have cached.  batches: drawn by `draw_loads`, with max_requests and
    max_tokens.  rounds, budget_s, progress: as in `measure`.
    """
    loads = draw_loads(batches, max_requests, max_tokens, max_context, np.random.default_rng(0))
    samples = measure(model, loads, rounds, budget_s, progress)
    key = profile_key(model.config, model.embedding.dtype, model.embedding.device)
    return fit(samples, model.config, key)
