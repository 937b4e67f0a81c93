"""Steps of decodes that are recorded and replayed: the bits of steps that are not, whatever happens in between."""

import gc

import pytest
import torch

from flexops.kernels import cpu_linear
from flexops.runtime import Engine, SamplingParams
from tests.runtime.serving import Asked, Given, asking, collect, prompt_of, serve, small_engine
from tests.tiny import make_model

pytestmark = pytest.mark.skipif(
    not cpu_linear.supports(torch.zeros(2, 2)), reason="oneDNN computes the products on this processor"
)


def _engine(model, replays: bool = True, **changes) -> Engine:
    engine = small_engine(model, **changes)
    if not replays:
        engine.executor.records = False
    return engine


def _count(engine: Engine, monkeypatch) -> list[int]:
    """The launches of every replay from here on."""
    from flexops.kernels.cpu_replay import Recording

    seen: list[int] = []
    replay = Recording.replay

    def counting(self: Recording) -> None:
        seen.append(len(self))
        replay(self)

    monkeypatch.setattr(Recording, "replay", counting)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("cache", ["hybrid", None], ids=["cache", "no cache"])
def test_a_batch_of_all_layouts_over_many_pages(monkeypatch, cache, dtype):
    if not cpu_linear.supports(torch.zeros(2, 2, dtype=dtype)):
        pytest.skip("oneDNN computes the products on this processor")
    model = make_model().to(dtype)
    asked = [asking(prompt_of(n, seed=n), layout, new=90) for n, layout in ((5, None), (17, "ssm"), (40, "attention"))]
    asked.append(Asked(prompt_of(9), SamplingParams(max_new_tokens=60, temperature=0.8, seed=3, keep_logits=True)))
    expected = serve(_engine(model, replays=False, context_cache=cache), asked)
    engine = _engine(model, context_cache=cache)
    seen = _count(engine, monkeypatch)
    given = serve(engine, asked)
    assert all(mine.same_bits(theirs) for mine, theirs in zip(given, expected, strict=True))
    assert len(seen) > 70 and min(seen) > 20, "steps were replayed, each with its layers' launches"


def test_a_set_that_comes_back_after_others_were_between(monkeypatch):
    """The recording of the two stands at an old position when the third has come and gone."""
    model = make_model()
    two = [asking(prompt_of(12, seed=1), new=60), asking(prompt_of(30, seed=2), new=60)]
    third = asking(prompt_of(50, seed=3), new=4)
    expected = [serve(_engine(model, replays=False, context_cache=None), [a])[0] for a in (*two, third)]
    engine = _engine(model, context_cache=None)
    seen = _count(engine, monkeypatch)
    ids = [engine.add_request(a.prompt, a.params) for a in two]
    given: dict[tuple[int, int], Given] = {}
    for step in range(200):
        if step == 15:
            ids.append(engine.add_request(third.prompt, third.params))
        if not engine.has_unfinished():
            break
        gc.collect()
        collect(given, engine)
    assert all(given[i, 0].same_bits(e) for i, e in zip(ids, expected, strict=True))
    recordings = [r for r in engine.executor._replays.values() if not isinstance(r, bool)]
    assert recordings and len(seen) > 30


def test_a_slot_that_another_request_takes_over(monkeypatch):
    """The same slots, other pages and other routes: a recording of those before must not run."""
    model = make_model()
    engine = _engine(model, context_cache=None)
    seen = _count(engine, monkeypatch)
    for seed, layout in ((1, "ssm"), (2, "ssm"), (3, "attention"), (4, None)):
        one = asking(prompt_of(20, seed=seed), layout, new=12)
        before = len(seen)
        assert serve(engine, [one])[0].same_bits(serve(_engine(model, False, context_cache=None), [one])[0])
        assert len(seen) > before


def test_page_tables_that_grow_wider_than_recorded(monkeypatch):
    """512 tokens of attention: more pages than the tables begin with."""
    model = make_model(max_position_embeddings=1024)
    engine = _engine(model, context_cache=None)
    columns = engine.tables.kv_pages.shape[2]
    one = asking(prompt_of(3), "attention", new=columns * engine.tables.layout.page_tokens + 40)
    seen = _count(engine, monkeypatch)
    given = serve(engine, [one])[0]
    assert engine.tables.kv_pages.shape[2] > columns
    assert given.same_bits(serve(_engine(model, False, context_cache=None), [one])[0])
    assert len(seen) > columns * engine.tables.layout.page_tokens


def test_layouts_that_run_apart_have_a_recording_each(monkeypatch):
    model = make_model()
    asked = [asking(prompt_of(8, seed=s), layout, new=20) for s, layout in enumerate(("ssm", "attention", "ssm"))]
    engine = _engine(model, selective_batching=False, context_cache=None)
    seen = _count(engine, monkeypatch)
    expected = serve(_engine(model, False, selective_batching=False, context_cache=None), asked)
    assert all(mine.same_bits(theirs) for mine, theirs in zip(serve(engine, asked), expected, strict=True))
    assert len(seen) > 30
    assert len([r for r in engine.executor._replays.values() if not isinstance(r, bool)]) == 2


def test_another_number_of_threads(monkeypatch):
    model, one = make_model(), asking(prompt_of(8), new=30)
    expected = serve(_engine(model, False, context_cache=None), [one])[0]
    engine, given, before = _engine(model, context_cache=None), {}, torch.get_num_threads()
    engine.add_request(one.prompt, one.params)
    try:
        for step in range(60):
            torch.set_num_threads(1 + step % 2)
            if engine.has_unfinished():
                collect(given, engine)
    finally:
        torch.set_num_threads(before)
    assert given[0, 0].same_bits(expected)


def test_steps_inside_and_outside_of_inference_mode(monkeypatch):
    model, one = make_model(), asking(prompt_of(8), new=30)
    expected = serve(_engine(model, False, context_cache=None), [one])[0]
    engine, given = _engine(model, context_cache=None), {}
    seen = _count(engine, monkeypatch)
    engine.add_request(one.prompt, one.params)
    for step in range(60):
        if engine.has_unfinished():
            with torch.inference_mode(step % 8 < 4):
                collect(given, engine)
    assert given[0, 0].same_bits(expected) and len(seen) > 10


def test_a_set_that_cannot_be_recorded_leaves_the_others(monkeypatch):
    """Without an FFN torch joins the branches of a mixed batch; a request alone is replayed all the same."""
    model = make_model(intermediate_size=0)
    asked = [asking(prompt_of(8, seed=1), "ssm", new=8), asking(prompt_of(9, seed=2), "attention", new=40)]
    expected = [serve(_engine(model, False, context_cache=None), [a])[0] for a in asked]
    engine = _engine(model, context_cache=None)
    seen = _count(engine, monkeypatch)
    assert all(mine.same_bits(theirs) for mine, theirs in zip(serve(engine, asked), expected, strict=True))
    assert len(seen) > 25


def test_recordings_of_requests_that_have_ended_are_dropped():
    model = make_model()
    engine = _engine(model, context_cache=None)
    for seed in range(6):
        serve(engine, [asking(prompt_of(8, seed=seed), new=8)])
    assert len(engine.executor._replays) == 1


def test_a_step_that_torch_computes_in_part_runs_as_it_is(monkeypatch):
    """fp16 has no CPU kernels: the definition runs, and nothing is recorded."""
    model = make_model().half()
    engine = _engine(model, context_cache=None)
    seen = _count(engine, monkeypatch)
    one = asking(prompt_of(8), new=10)
    assert len(serve(engine, [one])[0].token_ids) == 10
    assert not seen
