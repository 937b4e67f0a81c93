"""The Triton kernels in decode steps of one launch sequence, interpreted, in memory that begins as NaN."""

import pytest
import torch

from flexops.kernels import dispatch
from tests.kernels.helpers import INTERPRETED
from tests.runtime.serving import asking, prompt_of, serve, small_engine
from tests.tiny import make_model

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter is off")
@pytest.mark.parametrize(
    ("cache", "sizes", "dtype"),
    [
        pytest.param("hybrid", {}, torch.float32, id="cache, FFN, fp32"),
        pytest.param(None, {"intermediate_size": 0}, torch.float32, id="no cache, no FFN, fp32"),
        pytest.param("hybrid", {"intermediate_size": 0}, torch.bfloat16, id="cache, no FFN, bf16"),
    ],
)
def test_rows_of_the_other_route_and_of_no_request_change_nothing(cache, sizes, dtype):
    """Three requests of three layouts in a bucket of four rows, over these kernels on the ordinary path too."""
    model = make_model(num_hidden_layers=2, **sizes).to(dtype)
    layouts = (None, "ssm", ("ssm", "attention")) if cache else ("attention", "ssm", ("ssm", "attention"))
    asked = [asking(prompt_of(5 + 8 * i, seed=i), layout, new=3 + i) for i, layout in enumerate(layouts)]
    given = []
    for static in (True, False):
        engine = small_engine(model, context_cache=cache, static_decode=static)
        assert engine.executor.ops.__name__ == dispatch.BACKENDS["triton"]
        given.append(serve(engine, asked))
        assert not static or {size for size, _ in engine.executor.static.buckets} >= {1, 2, 4}
    for ours, theirs in zip(*given, strict=True):
        assert ours.token_ids == theirs.token_ids and ours.layout == theirs.layout
        assert all(torch.equal(a, b) for a, b in zip(ours.logits, theirs.logits, strict=True))
