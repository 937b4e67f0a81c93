"""What `aot.py` compiles: the launches that the operators really make, recorded instead of run.

The operators are called on CPU tensors with Triton's launch replaced by a recorder, so specifications cannot drift
from the launching code: types, alignment, constants, warps and stages are those of the call.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import common  # noqa: F401  the repository root on the path, for tests/
import torch
from torch import Tensor

from tests.kernels import inputs
from tests.kernels.inputs import Size

_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
}
ALL_ONES = "all = 1"
ALIGNED: list[list[object]] = [["tt.divisibility", 16]]

# Mamba-2 and Llama shapes of some 8 billion parameters
LARGE = Size(
    lengths=(65, 1, 64),
    cached=(2000, 0, 64),
    hidden=4096,
    ffn=14336,
    q_heads=32,
    kv_heads=8,
    head_dim=128,
    page_tokens=16,
    ssm_heads=128,
    ssm_head_dim=64,
    groups=8,
    d_state=128,
    chunk_size=64,
    heads_per_page=1,
)
MANY_HEADS = replace(LARGE, q_heads=64, kv_heads=1, head_dim=256)
_ATTENTION = ("paged_attention", "paged_attention_decode")
SIZES: dict[str, tuple[Size, torch.dtype, tuple[str, ...]]] = {
    "large": (LARGE, torch.bfloat16, inputs.CASES),
    "fp32": (LARGE, torch.float32, inputs.CASES),
    # sizes that are no powers of two, and the largest heads and states that are supported
    "odd": (
        replace(LARGE, hidden=2560, ffn=6912, q_heads=20, kv_heads=4, head_dim=80, ssm_heads=80, groups=1, d_state=96),
        torch.float16,
        inputs.CASES,
    ),
    "widest": (
        replace(LARGE, head_dim=256, q_heads=16, kv_heads=2, ssm_head_dim=256, ssm_heads=16, d_state=256),
        torch.bfloat16,
        inputs.CASES,
    ),
    # the largest tiles of attention: all query heads share one head of keys
    "one kv head": (MANY_HEADS, torch.bfloat16, _ATTENTION),
    "one kv head, fp32": (MANY_HEADS, torch.float32, _ATTENTION),
}


@dataclass(frozen=True)
class Spec:
    """One compilation of one kernel, in plain values so that it can be sent to another process.

    kernel: the operator, and the function's own name where it is another.  variant: the size it comes from.
    call: the case of the inputs.  varying: arguments that the kernel is never specialised on.
    """

    kernel: str
    variant: str
    call: str
    module: str
    function: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    varying: tuple[str, ...]
    num_warps: int
    num_stages: int

    def integers(self) -> list[str]:
        """The integer arguments, any of which Triton turns into a constant where it is 1."""
        return [name for name, kind in self.signature if kind in ("i32", "i64") and name not in self.varying]

    def with_ones(self, names: list[str]) -> "Spec":
        """The same compilation where these integer arguments are 1."""
        signature = tuple((n, "constexpr" if n in names else kind) for n, kind in self.signature)
        constants = self.constants + tuple((n, 1) for n in names)
        aligned = tuple(n for n in self.aligned if n not in names)
        ones = ALL_ONES if names == self.integers() else f"{' '.join(names)} = 1"
        variant = f"{self.variant}, {ones}"
        return replace(self, signature=signature, constants=constants, aligned=aligned, variant=variant)


def _spec(variant: str, call: str, kernel: Any, args: tuple, named: dict[str, Any]) -> Spec:
    """The specification that Triton's launcher would derive from a call."""
    options = {"num_warps": named.pop("num_warps", 4), "num_stages": named.pop("num_stages", 3)}
    bound = kernel.signature.bind(*args, **named)
    bound.apply_defaults()
    signature, constants, aligned = [], [], []
    for parameter in kernel.params:
        value, name = bound.arguments[parameter.name], parameter.name
        specialised = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and specialised):
            signature.append((name, "constexpr"))
            constants.append((name, value))
        elif isinstance(value, Tensor):
            signature.append((name, "*" + _TYPES[value.dtype]))
            if value.data_ptr() % 16 == 0:
                aligned.append(name)
        elif isinstance(value, bool):
            signature.append((name, "i1"))
        elif isinstance(value, int):
            signature.append((name, "i32" if -(2**31) <= value < 2**31 else "i64"))
            if value % 16 == 0 and specialised:
                aligned.append(name)
        else:
            signature.append((name, "fp32"))
    function = kernel.fn.__name__
    name = function.strip("_").removesuffix("_kernel")
    if name not in inputs.CASES:
        name = f"{inputs.operator(call)}_{name}"
    varying = tuple(p.name for p in kernel.params if not p.is_constexpr and p.do_not_specialize)
    types = (tuple(signature), tuple(constants), tuple(aligned), varying)
    return Spec(name, variant, call, kernel.fn.__module__, function, *types, **options)


@contextmanager
def _recording(variant: str, call: str, target: int) -> Iterator[list[Spec]]:
    """Record launches inside instead of making them, with the tiles that are chosen for a compute capability."""
    from triton.runtime.jit import JITFunction

    from flexops.kernels import attention

    specs: list[Spec] = []
    run, capability = JITFunction.run, attention.capability

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        specs.append(_spec(variant, call, self, args, named))

    JITFunction.run, attention.capability = record, lambda device: target // 10
    try:
        yield specs
    finally:
        JITFunction.run, attention.capability = run, capability


def specs(variants: list[str], target: int) -> list[Spec]:
    """The different compilations that one call of every operator needs for a compute capability, per size."""
    from flexops.kernels import triton_backend

    found: dict[Spec, None] = {}
    for variant in variants:
        size, dtype, cases = SIZES[variant]
        for case in cases:
            arguments = inputs.arguments(case, size, dtype)
            with _recording(variant, case, target) as recorded:
                getattr(triton_backend, inputs.operator(case))(*arguments)
            found.update(dict.fromkeys(recorded))
    return list(found)
