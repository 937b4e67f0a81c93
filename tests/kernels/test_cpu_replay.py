"""Recorded launches: the same bits on changed inputs, no more memory than the operators used, and what is refused."""

import gc

import pytest
import torch

from flexops.kernels import cpu
from flexops.kernels.cpu_replay import record
from flexops.kernels.linear import PackedLinear
from tests.kernels.helpers import randn


def _chain(x: torch.Tensor, layers: list[PackedLinear], gain: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = cpu.rms_norm(layer(x), gain, 1e-5)
    gate, up = x.chunk(2, dim=-1)
    return cpu.silu_mul(gate, up)


@pytest.fixture
def layers() -> list[PackedLinear]:
    made = [PackedLinear(randn(64, 64, seed=i, scale=0.2)) for i in range(6)]
    if made[0].form != "own":
        pytest.skip("oneDNN computes the products on this processor")
    return made


@pytest.fixture
def threads(request):
    """Runs the test with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
def test_a_replay_computes_what_the_operators_would(layers, threads):
    gain, x = randn(64, seed=10), randn(5, 64, seed=1)
    wide = PackedLinear(randn(4096, 32, seed=9))  # work for a team
    with torch.no_grad(), record() as finish:
        y = wide(_chain(x, layers, gain))
    recording = finish()
    assert recording is not None and len(recording) == 2 * len(layers) + 2
    for seed in range(2, 5):
        x.copy_(randn(5, 64, seed=seed))
        gc.collect()
        churn = [torch.full((5, 64), float("nan")) for _ in range(50)]  # takes whatever memory has been given back
        recording.replay()
        assert torch.equal(y, wide(_chain(x, layers, gain)))
        del churn


def test_memory_is_reused_as_the_operators_reuse_it(layers):
    x, gain = randn(5, 64, seed=1), randn(64, seed=10)
    with torch.no_grad(), record() as finish:
        y = _chain(x, layers, gain)
    recording = finish()
    assert recording is not None and y.shape == (5, 32)
    sizes = sorted(block.nbytes for block in recording.memory)
    assert sizes == [5 * 32 * 4, *[5 * 64 * 4] * 3], "twelve tensors of 5 x 64 in the room of three"


def test_what_torch_computes_is_not_recorded(layers):
    x, gain = randn(5, 64, seed=1), randn(64, seed=10)
    with torch.no_grad(), record() as finish:
        y = _chain(x * 2, layers, gain)
    assert finish() is None
    assert torch.equal(y, _chain(x * 2, layers, gain)), "and yet it ran"
    for computes in (lambda y: y.add_(1), lambda y: torch._foreach_mul_([y], 2), lambda y: torch.empty_like(y.T)):
        with torch.no_grad(), record() as finish:
            computes(_chain(x, layers, gain))
        assert finish() is None


def test_a_recording_holds_no_other_one():
    with record(), pytest.raises(RuntimeError, match="recorded already"), record():
        pass


def test_allocations_of_every_kind():
    x = randn(4, 6, seed=1)
    with torch.no_grad(), record() as finish:
        made = [
            torch.empty((2, 3), dtype=torch.int32),
            torch.empty(5),
            x.new_empty(3, 2),
            x.new_empty((2, 2), dtype=torch.int64),
            torch.empty_like(x),
            torch.empty_like(x, dtype=torch.bfloat16),
            x.new_empty(0, 7),
        ]
    assert finish() is not None
    assert [(tuple(t.shape), t.dtype) for t in made] == [
        ((2, 3), torch.int32),
        ((5,), torch.float32),
        ((3, 2), torch.float32),
        ((2, 2), torch.int64),
        ((4, 6), torch.float32),
        ((4, 6), torch.bfloat16),
        ((0, 7), torch.float32),
    ]
    assert all(t.data_ptr() % 64 == 0 for t in made)
    for i, t in enumerate(made):
        t.fill_(i)
    assert all((t == i).all() for i, t in enumerate(made)), "no two share memory"


def test_nothing_is_recorded_outside(layers):
    x, gain = randn(5, 64, seed=1), randn(64, seed=10)
    with torch.no_grad(), record() as finish:
        _chain(x, layers, gain)
    launched = len(finish())
    _chain(x, layers, gain)
    assert len(finish()) == launched
