"""Static decode steps on a device: nothing allocated, no wait, and a graph of one replays. Skipped without a GPU."""

import pytest
import torch

from flexops import EngineConfig, FlexHybridConfig, FlexHybridModel
from flexops.runtime import Engine, SamplingParams
from flexops.runtime.static_decode import StaticDecode
from tests.runtime.serving import asking, prompt_of, serve

pytest.importorskip("triton", reason="triton is not installed")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LAYOUTS = ("attention", "ssm", ("ssm", "attention", "ssm", "attention"), ("attention", "attention", "ssm", "ssm"), None)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = FlexHybridConfig(
        vocab_size=258, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, mamba_n_heads=8, mamba_d_head=64, mamba_d_state=64, eos_token_id=0,
        pad_token_id=1, bos_token_id=None,
    )  # fmt: skip
    return FlexHybridModel(config).to("cuda").eval()


def _engine(model: FlexHybridModel, static: bool) -> Engine:
    return Engine(model, EngineConfig(static_decode=static, context_cache=None, memory_bytes=1 << 28))


def _decoding(engine: Engine) -> None:
    """A request of each layout, all of which decode."""
    for i, layout in enumerate(LAYOUTS):
        engine.add_request(prompt_of(20 + 3 * i, seed=i), SamplingParams(max_new_tokens=60), layout)
    while engine.scheduler.waiting or not all(r.output for r in engine.scheduler.running):
        engine.step()


def test_logits_of_the_ordinary_path(model):
    """Of the first decode step, which both enter with the same token; products may sum in another order."""
    asked = [asking(prompt_of(20 + 3 * i, seed=i), layout, new=2) for i, layout in enumerate(LAYOUTS)]
    ours, theirs = serve(_engine(model, True), asked), serve(_engine(model, False), asked)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.logits[1], other.logits[1], rtol=1e-3, atol=1e-3)


def test_a_step_allocates_nothing_and_does_not_wait(model, monkeypatch):
    engine, run, made = _engine(model, True), StaticDecode.run, []

    def watched(self, *args):
        torch.cuda.set_sync_debug_mode("error")
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        try:
            return run(self, *args)
        finally:
            made.append(torch.cuda.memory_stats()["allocation.all.allocated"] - before)
            torch.cuda.set_sync_debug_mode("default")

    _decoding(engine)
    engine.step()
    monkeypatch.setattr(StaticDecode, "run", watched)
    for _ in range(4):
        engine.step()
    assert made == [0] * 4


def test_a_graph_of_a_step_gives_its_bits(model, monkeypatch):
    engine, run, compared = _engine(model, True), StaticDecode.run, []

    def captured(self, *args):
        caches = engine.pool.memory.clone()
        expected = run(self, *args).clone()
        after = engine.pool.memory.clone()
        engine.pool.memory.copy_(caches)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = run(self, *args)
        engine.pool.memory.copy_(caches)
        graph.replay()
        compared.append(torch.equal(logits, expected) and torch.equal(engine.pool.memory, after))
        return logits

    _decoding(engine)
    engine.step()
    monkeypatch.setattr(StaticDecode, "run", captured)
    for _ in range(3):
        engine.step()
    assert compared == [True] * 3
