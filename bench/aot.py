"""Compile every Triton kernel for sm_80, sm_90 and sm_100 without a GPU, and read what the compiler made of it.

Registers, stack (spills), shared memory, 128-bit loads and tensor-core instructions per kernel and target, from the
cubin. Each kernel is compiled as the operators launch it at several sizes, and again with each integer argument equal
to 1, which Triton turns into a constant of another type. --quick compiles the main size for sm_90 only, and all
integers 1 at once: that shows that it compiles, but not what it needs, because no launch has all of them 1.
"""

import importlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import aot_specs
from aot_specs import ALIGNED, ALL_ONES, Spec
from common import Report, arguments

TARGETS = (80, 90, 100)
TENSOR_CORE = ("HMMA", "HGMMA", "UTCHMMA")
WIDE_LOADS = ("LDG.128", "LDGSTS.128")  # to registers, and copied to shared memory by the pipeline
COUNTED = {
    "LDG.128": r"\bLDG\.E\S*\.128\b",
    "LDGSTS.128": r"\bLDGSTS\.E\S*\.128\b",
    **{name: rf"\b{name}\b" for name in (*TENSOR_CORE, "STL", "LDL")},
}
SHARED_LIMIT = {"80": 163 * 1024, "90": 227 * 1024, "100": 227 * 1024}


def compile_spec(spec: Spec, target: int) -> dict[str, Any]:
    """Compile one specification for one compute capability and return its resources, or the error."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(spec.module), spec.function)
    attributes = {(function.arg_names.index(name),): ALIGNED for name in spec.aligned}
    source = ASTSource(function, dict(spec.signature), dict(spec.constants), attributes)
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages}
    begin = time.perf_counter()
    result = {"kernel": spec.kernel, "call": spec.call, "variant": spec.variant, "target": f"sm_{target}"}
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    except Exception as error:  # the compiler raises many kinds; all of them are a result here
        return {**result, "error": f"{type(error).__name__}: {str(error)[:500]}"}
    seconds = time.perf_counter() - begin
    shared = compiled.metadata.shared
    return {**result, **_resources(compiled.asm["cubin"]), "shared": shared, "seconds": round(seconds, 1)}


def _resources(cubin: bytes) -> dict[str, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
        sass = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr)
    assert found is not None, "cuobjdump prints no resource usage"
    counts = {name: len(re.findall(pattern, sass)) for name, pattern in COUNTED.items()}
    return {"registers": int(found[1]), "stack": int(found[2]), **counts}


def jobs(quick: bool) -> Iterable[tuple[Spec, int]]:
    """What to compile for which target."""
    for target in (90,) if quick else TARGETS:
        for spec in aot_specs.specs(["large"] if quick else list(aot_specs.SIZES), target):
            variants = [spec]
            if spec.variant == "large" and quick:
                variants.append(spec.with_ones(spec.integers()))
            elif spec.variant == "large":
                variants += [spec.with_ones([name]) for name in spec.integers()]
            for variant in dict.fromkeys(variants):
                yield variant, target


def _start_worker(cache: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = cache


def main() -> None:
    os.environ.pop("TRITON_INTERPRET", None)  # before a kernel is imported
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", metavar="KERNEL", help="kernels whose names contain one of these")
    report = Report("aot", parser)
    only = report.options.only or [""]
    with tempfile.TemporaryDirectory() as cache:  # an old cache would hide what today's source compiles to
        todo = [(spec, target) for spec, target in jobs(report.options.quick) if any(o in spec.kernel for o in only)]
        workers = min(len(todo), os.cpu_count() or 1)
        with ProcessPoolExecutor(workers, get_context("fork"), _start_worker, (cache,)) as pool:
            results = list(pool.map(compile_spec, *zip(*todo, strict=True)))
    report.data["kernels"] = results
    rows = []
    for kernel in dict.fromkeys(r["kernel"] for r in results):
        for target in dict.fromkeys(r["target"] for r in results):
            mine = [r for r in results if (r["kernel"], r["target"]) == (kernel, target)]
            _check(report, f"{kernel}.{target}", mine)
            rows += [_row(r) for r in mine if "error" not in r and "= 1" not in r["variant"]]
    columns = ("kernel", "call", "size", "target", "registers", "stack", "shared", "128-bit loads", "tensor core")
    report.table("compiled without a GPU", columns, rows)
    report.finish()


def _check(report: Report, name: str, results: list[dict[str, Any]]) -> None:
    """Nothing spills, nothing needs more shared memory than there is, and everything compiles."""
    failed = [r for r in results if "error" in r]
    for r in failed:
        report.say(f"{name} does not compile ({r['call']}, {r['variant']}): {r['error']}")
    counted = [r for r in results if "error" not in r and ALL_ONES not in r["variant"]]
    for r in counted:
        if r["stack"]:
            report.say(f"{name} spills {r['stack']} bytes ({r['call']}, {r['variant']})")
    report.check(f"{name}.stack", sys.maxsize if failed else max(r["stack"] for r in counted), 0, better="lower")
    limit = SHARED_LIMIT[name.rsplit("_", 1)[1]]
    if any(r["shared"] > limit for r in counted):
        report.check(f"{name}.shared", max(r["shared"] for r in counted), limit, better="lower")


def _row(result: dict[str, Any]) -> tuple[Any, ...]:
    used = [f"{result[name]} {name}" for name in TENSOR_CORE if result[name]]
    numbers = [str(result[name]) for name in ("registers", "stack", "shared")]
    wide = str(sum(result[name] for name in WIDE_LOADS))
    return (
        result["kernel"],
        result["call"],
        result["variant"],
        result["target"],
        *numbers,
        wide,
        ", ".join(used) or "-",
    )


if __name__ == "__main__":
    main()
