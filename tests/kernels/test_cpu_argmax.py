"""The argmax of the logits, against numpy's."""

import math

import pytest
import torch

from flexops.kernels.cpu_argmax import argmax


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [1, 5, 16, 63, 64, 65, 1000, 1024, 1025, 1041, 5000])
@pytest.mark.parametrize("odd", [None, math.nan, math.inf, -math.inf])
def test_first_of_the_largest(dtype: torch.dtype, columns: int, odd: float | None) -> None:
    generator = torch.Generator().manual_seed(columns)
    random = torch.randn(40, columns + 3, generator=generator)
    ties = torch.randint(-2, 2, (40, columns + 3), generator=generator).float()
    for scores in (random, -random.abs(), ties, ties * 0.0, torch.full_like(ties, -math.inf)):
        scores = scores.to(dtype)[:, :columns]  # rows apart
        if odd is not None:
            scores[::3, columns * 7 // 9] = odd
            scores[::2, columns // 2] = odd
        assert argmax(scores).tolist() == scores.float().numpy().argmax(-1).tolist()


def test_other_dtypes_are_left_to_the_caller() -> None:
    assert argmax(torch.zeros(2, 3, dtype=torch.float16)) is None
