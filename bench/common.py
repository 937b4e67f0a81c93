"""What all benchmarks share: options, interleaved timing, a table for people and one line of JSON for machines.

report = Report("name", arguments(__doc__))
times = interleave({"ours": f, "theirs": g}, rounds=20)
report.check("speedup", times.ratio("theirs", "ours"), target=1.0)
report.finish()
"""

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # a script finds its own folder, and takes inputs from tests/ too
    sys.path.append(str(ROOT))

PACKAGES = ("flexops", "torch", "triton", "transformers", "numba", "numpy", "flash-attn", "mamba-ssm")
NOISY = 0.15  # spread of a measurement, over its median, from which it is called noisy


def arguments(description: str | None, plot: bool = False) -> argparse.ArgumentParser:
    """The options every benchmark has."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=formatter)
    parser.add_argument("--quick", action="store_true", help="a smaller run that ends within 60 s")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object, on the last line")
    if plot:
        parser.add_argument("--plot", type=Path, metavar="PNG", help="write a plot to this file")
    return parser


# --- the machine ----------------------------------------------------------------------------------------------


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    facts: dict[str, Any] = {
        "system": platform.system(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if hasattr(os, "getloadavg"):
        facts["load"] = round(os.getloadavg()[0], 2)
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts["gpu"] = properties.name
        facts["gpu_memory_bytes"] = properties.total_memory
    return facts


def versions() -> dict[str, str]:
    """Versions of what took part, and the commit."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    command = ["git", "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        found["commit"] = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    return found


# --- timing ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Times:
    """Seconds of each side in each round; the sides of one round ran right after each other."""

    seconds: dict[str, list[float]]

    def median(self, side: str) -> float:
        return statistics.median(self.seconds[side])

    def ratio(self, over: str, under: str) -> float:
        """The median over rounds of one side's time over another's: > 1 where `under` is the faster one."""
        return statistics.median(self.ratios(over, under))

    def ratios(self, over: str, under: str) -> list[float]:
        return [a / b for a, b in zip(self.seconds[over], self.seconds[under], strict=True)]

    def spread(self, over: str, under: str) -> float:
        """The middle half of the ratios over their median."""
        return spread(self.ratios(over, under))


def spread(values: Sequence[float]) -> float:
    """The width of the middle half of the values over their median; 0 for fewer than four."""
    if len(values) < 4:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / middle if middle else math.inf


def interleave(
    sides: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 1, budget_s: float = math.inf
) -> Times:
    """Run the sides in turn, in alternating order, so that a slow moment of the machine meets all of them.

    Stops early, after at least three rounds, once budget_s seconds have passed.
    """
    for _ in range(warmup):
        for side in sides.values():
            side()
    _wait()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    names, start = list(sides), time.perf_counter()
    for done in range(rounds):
        if done >= 3 and time.perf_counter() - start > budget_s:
            break
        for name in names if done % 2 == 0 else reversed(names):
            begin = time.perf_counter()
            sides[name]()
            _wait()
            seconds[name].append(time.perf_counter() - begin)
    return Times(seconds)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# --- report ---------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """Collects checks and data of one benchmark, prints them, and gives the exit status.

    bench: its name.  parser: from `arguments`, parsed here into `options`.
    """

    bench: str
    parser: argparse.ArgumentParser
    options: argparse.Namespace = field(init=False)
    checks: list[dict[str, Any]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    console: Console = field(default_factory=lambda: Console(width=None if sys.stdout.isatty() else 140))

    def __post_init__(self) -> None:
        self.options = self.parser.parse_args()

    def check(self, name: str, value: float, target: float, better: str = "higher", noise: float = 0.0) -> bool:
        """Record one number with the target it must reach; `noise` is the spread it was measured with."""
        if better not in ("higher", "lower"):
            raise ValueError(f"better: got {better!r}; allowed: 'higher' or 'lower'")
        ok = value >= target if better == "higher" else value <= target
        entry = {"name": name, "value": value, "target": target, "better": better, "ok": bool(ok)}
        if noise > NOISY:
            entry["noise"] = noise
        self.checks.append(entry)
        return bool(ok)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print a table: the first column is names, the others numbers."""
        table = Table(title=title, title_justify="left")
        for i, column in enumerate(columns):
            table.add_column(column, justify="left" if i == 0 else "right")
        for row in rows:
            table.add_row(*(number(cell) if isinstance(cell, float) else str(cell) for cell in row))
        self.console.print(table)

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    def finish(self) -> None:
        """Print the checks, and the JSON line where it was asked for; exits with 1 where a check failed."""
        if self.checks:
            marks = {True: "ok", False: "MISSED"}
            rows = [
                (c["name"], float(c["value"]), f"{'>=' if c['better'] == 'higher' else '<='} {number(c['target'])}",
                 marks[c["ok"]] + (" (noisy)" if "noise" in c else ""))
                for c in self.checks
            ]  # fmt: skip
            self.table(f"{self.bench}: checks", ("check", "value", "target", ""), rows)
        noisy = [c["name"] for c in self.checks if "noise" in c]
        if noisy:
            self.say(f"noisy run: the middle half of {', '.join(noisy)} spreads over {NOISY:.0%} of the median or more")
        if self.options.json:
            result = {"bench": self.bench, "machine": machine(), "versions": versions(), "checks": self.checks}
            sys.stdout.flush()
            print(json.dumps({**result, "data": self.data}), flush=True)
        sys.exit(0 if all(c["ok"] for c in self.checks) else 1)


def number(value: float) -> str:
    """A number with as many digits as tell something."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))) - 1)
    return f"{value:,.{min(digits, 6)}f}"
