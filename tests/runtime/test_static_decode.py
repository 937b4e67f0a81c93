"""Decode steps of one launch sequence: the bits of the ordinary path, whatever the layouts, and no tensor per step."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flexops import EngineConfig
from flexops.runtime import Engine, SamplingParams
from flexops.runtime import static_decode as module
from flexops.runtime.static_decode import IndexBuffer
from tests.runtime.serving import Asked, Given, alone, asking, collect, prompt_of, random_requests, run, serve
from tests.runtime.serving import small_engine as engine_of
from tests.runtime.test_branches import coordinator
from tests.tiny import make_model

DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]
CACHES = [pytest.param("hybrid", id="cache"), pytest.param(None, id="no cache")]


def static_engine(model, **changes) -> Engine:
    return engine_of(model, static_decode=True, **changes)


def assert_same(ours: list[Given], theirs: list[Given]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.token_ids == other.token_ids and len(mine.token_ids)
        assert mine.same_bits(other)


def mixed(new: int = 60) -> list[Asked]:
    """All kinds of layouts of a model of three layers, greedy and sampled, of lengths that end at different steps."""
    layouts = [None, "ssm", "attention", ("ssm", "attention", "ssm"), ("attention", "ssm", "attention"), None]
    asked = [asking(prompt_of(4 + 9 * i, seed=i), layout, new=new - new * i // 8) for i, layout in enumerate(layouts)]
    params = SamplingParams(max_new_tokens=new // 2, temperature=0.8, seed=3, keep_logits=True)
    return [*asked, Asked(prompt_of(9), params, None, 0.4)]


# --- the bits of the ordinary path ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache", CACHES)
def test_all_layouts_together_over_many_pages(cache, dtype):
    model = make_model().to(dtype)
    engine = static_engine(model, context_cache=cache)
    assert_same(serve(engine, mixed()), serve(engine_of(model, context_cache=cache), mixed()))
    assert {size for size, _ in engine.executor.static.buckets} == {1, 2, 4, 8}
    assert {columns for _, columns in engine.executor.static.buckets} == {4, 8}
    assert not engine.executor._replays, "nothing is recorded beside it"


@pytest.mark.parametrize("dtype", DTYPES)
def test_requests_that_come_and_go(dtype):
    """New ones enter while others decode, so that ordinary steps with slices lie between static ones."""
    model = make_model().to(dtype)
    asked = random_requests(model, 24, seed=5)
    expected = [alone(model, a, context_cache=None) for a in asked]
    engine, given = static_engine(model, max_num_requests=6), {}
    ids: list[int] = []
    for step in range(400):
        if step % 3 == 0 and len(ids) < len(asked):
            a = asked[len(ids)]
            ids.append(engine.add_request(a.prompt, a.params, a.layout, a.gate_bias))
        elif len(ids) == len(asked) and not engine.has_unfinished():
            break
        collect(given, engine)
    assert_same([given[i, 0] for i in ids], expected)
    assert len({size for size, _ in engine.executor.static.buckets}) >= 3


MODELS = {
    "no FFN": {"intermediate_size": 0},
    "some without FFN": {"layers_without_ffn": [0, 2]},
    "fixed layout": {"layer_routes": ["ssm", "attention", "ssm"]},
    "fixed layout without FFN": {"layer_routes": ["attention", "ssm", "ssm"], "intermediate_size": 0},
    "adaptive between fixed ones": {"layer_routes": ["attention", "adaptive", "ssm"]},
    "attention alone": {"layer_routes": ["attention"] * 3},
    "SSM alone": {"layer_routes": ["ssm"] * 3},
    "biases": {"attention_bias": True, "mamba_proj_bias": True},
    "no rotation, groups": {"rope_theta": None, "mamba_n_groups": 2},
}


@pytest.mark.parametrize("sizes", MODELS.values(), ids=MODELS.keys())
def test_kinds_of_models(sizes):
    model = make_model(**sizes)
    fixed = "adaptive" not in model.config.layer_routes
    asked = [Asked(a.prompt, a.params) for a in mixed(40)] if fixed or "layer_routes" in sizes else mixed(40)
    assert_same(serve(static_engine(model), asked), serve(engine_of(model), asked))


def test_the_next_turn_of_a_conversation_hits_as_much():
    """Gate rows of generated tokens are kept: more than the 16 that their table begins with."""
    model, turns = make_model(), []
    for engine in (static_engine(model), engine_of(model)):
        first = run(engine, [asking(prompt_of(20, seed=i), new=40 + i) for i in range(3)])
        prompts = [(*prompt_of(20, seed=i), *given.token_ids, 7, 8, 9) for i, (given, _) in enumerate(first)]
        second = run(engine, [asking(prompt, new=5) for prompt in prompts])
        turns.append((first, second))
        assert max(last.cached_tokens for _, last in second) == 20 + 42 - 1, (
            "of one whose routes stay: prompt and answer"
        )
        engine.clear_cache()
        assert engine.pool.free == engine.pool.num_pages
    for ours, theirs in zip(*turns, strict=True):
        assert_same([given for given, _ in ours], [given for given, _ in theirs])
        assert [last.cached_tokens for _, last in ours] == [last.cached_tokens for _, last in theirs]
        assert [last.gate_margins for _, last in ours] == [last.gate_margins for _, last in theirs]


def test_gate_rows_are_those_of_the_ordinary_path():
    model, tables = make_model(), []
    for engine in (static_engine(model), engine_of(model)):
        for a in (asking(prompt_of(20), new=40), asking(prompt_of(5), "ssm", new=60), asking(prompt_of(7), new=33)):
            engine.add_request(a.prompt, a.params, a.layout)
        while len(engine.scheduler.running) < 3 or min(len(r.output) for r in engine.scheduler.running) < 32:
            engine.step()
        gated = [r for r in engine.scheduler.running if r.gate_rows]
        tables.append([engine.executor.gate_table[r.slot, : r.replayed] for r in gated])
    assert len(tables[0]) == 2 and all(torch.equal(a, b) and a.any() for a, b in zip(*tables, strict=True))


def test_samples_of_one_prompt():
    model = make_model()
    params = SamplingParams(max_new_tokens=20, temperature=0.9, seed=4, n=3, keep_logits=True)
    given = []
    for engine in (static_engine(model), engine_of(model)):
        engine.add_request(prompt_of(11), params)
        found: dict[tuple[int, int], Given] = {}
        while engine.has_unfinished():
            collect(found, engine)
        given.append([found[0, sample] for sample in range(3)])
    assert_same(*given)


def test_preempted_requests():
    model = make_model()
    asked = [asking(prompt_of(30, seed=i), "attention", new=60) for i in range(6)]
    expected = [alone(model, a, context_cache=None) for a in asked]
    pages = engine_of(model).tables.pages_for_all([0, 0, 0], 90)
    size = engine_of(model).pool.layout.page_bytes
    engine = static_engine(model, memory_bytes=3 * pages * size)
    assert_same(serve(engine, asked), expected)
    assert engine.scheduler.preemptions > 0


def test_layouts_that_run_apart():
    model = make_model()
    engine = static_engine(model, selective_batching=False)
    assert_same(serve(engine, mixed(20)), serve(engine_of(model), mixed(20)))


def test_inside_and_outside_of_inference_mode():
    model, a = make_model(), asking(prompt_of(8), new=40)
    engine, given = static_engine(model), {}
    engine.add_request(a.prompt, a.params)
    for step in range(60):
        if engine.has_unfinished():
            with torch.inference_mode(step % 8 < 4):
                collect(given, engine)
    assert_same([given[0, 0]], [alone(model, a)])


@pytest.mark.parametrize("fused", [False, True])
def test_beside_a_coordinator(fused):
    """Fused where decodes take one launch, else one branch after the other; prompts are coordinated as ever."""
    model = make_model()
    engine = static_engine(model)
    engine.executor.coordinator = coordinator(engine.executor.model, [], fused, [], fork_join_us=float("inf"))
    engine.executor.static.fused = fused
    assert_same(serve(engine, mixed(30)), serve(engine_of(model), mixed(30)))


def test_fp16_which_runs_the_definition():
    model = make_model().half()
    asked = [asking(prompt_of(8), new=6), asking(prompt_of(5), "ssm", new=4)]
    assert [len(given.token_ids) for given in serve(static_engine(model), asked)] == [6, 4]


# --- what a step does on the host -----------------------------------------------------------------------------


class _Made(TorchDispatchMode):
    """Counts tensors that are made with memory of their own."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        found = [x for x in (made if isinstance(made, tuple | list) else (made,)) if isinstance(x, torch.Tensor)]
        self.count += sum(x.untyped_storage().data_ptr() not in given for x in found if x.numel())
        return made


@pytest.mark.parametrize("cache", CACHES)
def test_a_step_makes_no_tensor_and_sends_one_copy(cache, monkeypatch):
    model = make_model()
    engine = static_engine(model, context_cache=cache)
    ours, sent = engine.executor.static.run, []
    counts: dict[tuple, list[int]] = {}
    send = IndexBuffer.send
    monkeypatch.setattr(IndexBuffer, "send", lambda self: sent.append(1) or send(self))

    def counted(slots, *rest):
        with _Made() as made:
            logits = ours(slots, *rest)
        assert logits.shape == (len(slots), model.config.vocab_size)
        counts.setdefault((len(engine.executor.static.buckets), len(slots)), []).append(made.count)
        return logits

    monkeypatch.setattr(engine.executor.static, "run", counted)
    serve(engine, mixed())
    steps = [count for made in counts.values() for count in made]
    assert len(sent) == len(steps) > 50
    opened = sum(count > 0 for count in steps)
    assert opened == len(engine.executor.static.buckets), "a tensor is made only where a bucket is"


# --- index tensors --------------------------------------------------------------------------------------------


def _decoding(engine: Engine, layouts: list) -> list:
    """Requests with these layouts, each with its first token."""
    for i, layout in enumerate(layouts):
        engine.add_request(prompt_of(20 + i, seed=i), SamplingParams(max_new_tokens=9), layout)
    while len(engine.scheduler.running) < len(layouts) or not all(r.output for r in engine.scheduler.running):
        engine.step()
    return engine.scheduler.make_room()


def test_where_the_rows_of_a_step_go():
    """Three requests in a bucket of four rows: one of attention, one of the SSM, one of both."""
    engine = static_engine(make_model())
    requests = _decoding(engine, ["attention", "ssm", ("ssm", "attention", "ssm")])
    slots = np.array([r.slot for r in requests])
    static, tables = engine.executor.static, engine.tables
    bucket = static._bucket(slots, engine.executor.ops)
    assert (bucket.size, bucket.columns) == (4, 2)
    bucket.fill(tables, slots, [7, 8, 9], [2, -1, 5], gate_tokens=16)
    index = bucket.index.tensors
    context = tables.context[slots].tolist()
    assert index["ids"].tolist() == [7, 8, 9, 0] and index["positions"].tolist() == [*context, 0]
    assert index["context_lens"].tolist() == [
        [context[0] + 1, 0, 0, 0],
        [context[0] + 1, 0, context[2] + 1, 0],
        [context[0] + 1, 0, 0, 0],
    ]
    assert index["inverse"].tolist() == [[0, 5, 6, -1], [0, 5, 2, -1], [0, 5, 6, -1]]
    table = index["page_table"]
    assert torch.equal(table[1, [0, 2]], torch.from_numpy(tables.kv_pages[1, slots[[0, 2]], :2]))
    assert (table[1, [0, 2]] >= 0).all() and (table[0, 0] >= 0).all()
    assert (table[:, [1, 3]] == -1).all() and (table[[0, 2], 2] == -1).all()
    slot = index["slot_mapping"]
    assert slot[1, 2] == table[1, 2, context[2] // 16] * 16 + context[2] % 16
    assert (slot[:, [1, 3]] == -1).all() and (slot[[0, 2], 2] == -1).all() and (slot[:, 0] >= 0).all()
    for name, entries in (("state_pages", tables.state_pages), ("conv_pages", tables.conv_pages)):
        assert torch.equal(index[name][:, 1], torch.from_numpy(entries[:, slots[1]])) and (index[name][:, 1] >= 0).all()
        assert (index[name][:, [0, 3]] == -1).all() and (index[name][1, 2] == -1).all()
    gates = [[(slots[0] * 16 + 2) * 3 + i, -1, (slots[2] * 16 + 5) * 3 + i, -1] for i in range(3)]
    assert index["gate_rows"].view(3, 4).tolist() == gates


def test_a_smaller_batch_leaves_nothing_of_the_one_before():
    engine = static_engine(make_model())
    slots = np.array([r.slot for r in _decoding(engine, ["attention", "ssm", "attention", "ssm"])])
    bucket = engine.executor.static._bucket(slots, engine.executor.ops)
    bucket.fill(engine.tables, slots, [7, 8, 9, 10], [0, 1, 2, 3], 16)
    bucket.fill(engine.tables, slots[:3], [7, 8, 9], [0, 1, 2], 16)
    index = bucket.index.tensors
    for name in ("inverse", "slot_mapping", "page_table", "state_pages", "conv_pages"):
        assert (index[name][:, 3] == -1).all(), name
    assert not index["context_lens"][:, 3].any() and index["ids"][3] == 0 == index["positions"][3]
    assert (index["gate_rows"].view(3, 4)[:, 3] == -1).all()


def test_index_tensors_share_one_block_of_memory():
    made = IndexBuffer(
        {"a": ((3,), np.int32), "b": ((2, 5), np.int64), "none": ((0, 4), np.int32)}, torch.device("cpu")
    )
    made.clear()
    assert (made.tensors["a"] == -1).all() and (made.tensors["b"] == -1).all() and made.tensors["none"].shape == (0, 4)
    made.arrays["b"][1] = [1, 2, 3, 4, 5]
    assert made.tensors["b"].dtype == torch.int64 and made.tensors["b"][1].tolist() == [1, 2, 3, 4, 5]
    assert made.tensors["b"].data_ptr() - made.tensors["a"].data_ptr() == 64


def test_on_a_gpu_one_copy_is_queued_and_awaited_before_the_next_numbers(monkeypatch):
    """A wiring test: what is asked of torch."""
    asked: list = []
    empty = torch.empty

    def made(*size, device=None, pin_memory=False, **options):
        asked.append("page-locked" if pin_memory else str(device))
        return empty(*size, **options)

    event = SimpleNamespace(synchronize=lambda: asked.append("wait"), record=lambda: asked.append("record"))
    monkeypatch.setattr(torch, "empty", made)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    index = IndexBuffer({"a": ((3,), np.int32), "b": ((2, 5), np.int64)}, torch.device("cuda", 1))
    assert asked == ["page-locked", "cuda:1"]
    asked.clear()
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, x, **how: asked.append(how) or copy(self, x))
    index.clear()
    index.arrays["a"][:] = [4, 5, 6]
    index.send()
    assert asked == ["wait", {"non_blocking": True}, "record"]
    assert index.tensors["a"].tolist() == [4, 5, 6] and (index.tensors["b"] == -1).all()


def test_the_setting_is_checked():
    assert EngineConfig().static_decode is False and EngineConfig(static_decode=True).static_decode
    with pytest.raises(ValueError, match="static_decode='yes' must be True or False"):
        EngineConfig(static_decode="yes")
    assert Engine(make_model(), EngineConfig(memory_bytes=1 << 22)).executor.static is None


@pytest.mark.parametrize(("n", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (64, 64), (65, 128)])
def test_sizes_of_buckets(n, size):
    assert module._power_of_two(n) == size
