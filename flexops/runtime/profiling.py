"""The time of a layer's parts from a profile of them: what to measure, how it is fitted, where it is kept (§5.2).

A branch of one layer takes, by Table 1, O(L d^2 + L^2 d) for attention's prefill and O(d^2 + r d) for its decode,
O(L d^2 + L d_s) and O(d^2 + d_s) for the SSM's; the feed-forward network behind them takes O(L d^2). The terms are
counted from a batch (`terms`), and the microseconds of each are fitted to a profile of the model on the device, once
(`fit`). `profile_model` in `measuring.py` takes it.
"""

import hashlib
import json
import logging
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..config import FlexHybridConfig
from ..kernels import ATTENTION, SSM

logger = logging.getLogger(__name__)

FFN = 2  # the part of a layer that is no branch, beside the routes ATTENTION and SSM
PART_NAMES = {ATTENTION: "attention", SSM: "ssm", FFN: "ffn"}
# A matrix product's time rises with its rows in steps and slopes: it is fitted as a line between these numbers of rows
ROW_KNOTS = (0, 2, 8, 32, 128, 512)
FORMAT = 2  # of the terms and the file: a profile of another one is not used
FILE_PREFIX = "flexops-profile-"


@dataclass(frozen=True)
class BranchLoad:
    """What one branch, or the feed-forward network, has to do in one layer and step.

    counts, starts: int [R], rows of each request and the tokens in its cache before them.  num_decodes: the leading
    requests are decodes, of one row each; the others are ranges of prompts.
    """

    counts: np.ndarray
    starts: np.ndarray
    num_decodes: int

    @classmethod
    def of(cls, decodes: Iterable[int] = (), prefills: Iterable[tuple[int, int]] = ()) -> "BranchLoad":
        """From the tokens cached before each decode, and (rows, tokens cached before) of each prefill."""
        decodes, prefills = list(decodes), list(prefills)
        counts = np.array([1] * len(decodes) + [rows for rows, _ in prefills], dtype=np.int64)
        starts = np.array(decodes + [start for _, start in prefills], dtype=np.int64)
        return cls(counts, starts, len(decodes))

    @property
    def tokens(self) -> int:
        """Rows of the part."""
        return int(self.counts.sum())

    @property
    def prefill_tokens(self) -> int:
        return self.tokens - self.num_decodes

    @property
    def decode_keys(self) -> int:
        """Keys that the decodes see, their own included."""
        return int(self.starts[: self.num_decodes].sum()) + self.num_decodes

    @property
    def prefill_keys(self) -> int:
        """Keys that the last token of each prefill sees, together."""
        return int((self.starts + self.counts)[self.num_decodes :].sum())

    @property
    def prefill_pairs(self) -> float:
        """Pairs of a prefill's query and a key it sees."""
        counts, starts = (x[self.num_decodes :].astype(np.float64) for x in (self.counts, self.starts))
        return float((counts * starts + counts * (counts + 1) / 2).sum())


def terms(part: int, load: BranchLoad, config: FlexHybridConfig) -> np.ndarray:
    """The terms of Table 1 for one part of a layer: fp64 [k], each of which takes time in proportion.

    A constant for the layer, one for a single row (matrix libraries take another path then), and L d^2 in multiply-adds
    of the matrix products, in the segments of ROW_KNOTS. A branch goes on with a constant for having decodes and one
    for having prefills, and ranges that prefill; then attention's requests that decode, L^2 d (pairs) and r d (keys, of
    prefills and of decodes), or the SSM's L d_s and d_s. Multiply-adds are in millions.
    """
    tokens, prefills = load.tokens, len(load.counts) - load.num_decodes
    if part == ATTENTION:
        heads = config.num_attention_heads * config.head_dim
        weights = config.hidden_size * config.head_dim * 2 * (config.num_attention_heads + config.num_key_value_heads)
        requests = [prefills, load.num_decodes]
        core = [load.prefill_pairs * heads, load.prefill_keys * heads, load.decode_keys * heads]
    elif part == SSM:
        weights = config.hidden_size * (2 * config.d_inner + config.conv_dim + config.mamba_n_heads)
        state = config.d_inner * config.mamba_d_state
        requests = [prefills]
        core = [load.prefill_tokens * state, load.num_decodes * state]
    else:
        weights = 3 * config.hidden_size * config.intermediate_size
    ends = (*ROW_KNOTS[1:], np.inf)
    rows = [min(max(tokens - start, 0), end - start) for start, end in zip(ROW_KNOTS, ends, strict=True)]
    shared = [1.0, float(tokens == 1), *(weights * segment / 1e6 for segment in rows)]
    if part == FFN:
        return np.array(shared)
    kinds = [float(load.num_decodes > 0), float(prefills > 0)]
    return np.array([*shared, *kinds, *requests, *(c / 1e6 for c in core)])


def non_negative_least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The x >= 0 with the least |matrix x - target|, by the active-set method of Lawson and Hanson.

    matrix: fp64 [n, k].  target: fp64 [n].  Returns fp64 [k].
    """
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    a = matrix / scale
    x, passive = np.zeros(a.shape[1]), np.zeros(a.shape[1], dtype=bool)
    for _ in range(3 * a.shape[1]):  # each round adds a column; a column may leave again, but not for ever
        gradient = np.where(passive, -np.inf, a.T @ (target - a @ x))
        if gradient.max() <= 1e-10 * np.linalg.norm(target):
            break
        passive[gradient.argmax()] = True
        while True:
            solution = np.zeros_like(x)
            solution[passive] = np.linalg.lstsq(a[:, passive], target, rcond=None)[0]
            negative = passive & (solution <= 0)
            if not negative.any():
                x = solution
                break
            x += (x[negative] / (x[negative] - solution[negative])).min() * (solution - x)
            passive &= x > 1e-12 * x.max()
            x[~passive] = 0.0
    return x / scale


@dataclass(frozen=True)
class Sample:
    """One measured batch: the part of a layer, its load, its median time and the spread of its runs.

    us: microseconds, median over runs.  spread: the middle half of the runs over their median.  wall_us, wall_spread:
    the same by the clock on the wall, where us does not count what other programs took.
    """

    part: int
    load: BranchLoad
    us: float
    spread: float
    wall_us: float
    wall_spread: float


@dataclass(frozen=True)
class HeldOut:
    """How a fit predicts samples that it was not fitted to; all as fractions of the measured time.

    median, p90: of the absolute errors.  spread: the median spread of these samples' own runs.  count: samples.
    """

    median: float
    p90: float
    spread: float
    count: int


@dataclass(frozen=True)
class BranchProfile:
    """What the parts of a model's layers take on one device.

    key: what it holds for, see `profile_key`.  coefficients: per part's name, microseconds of each of `terms`.
    held_out: per part's name, how well samples outside of the fit were predicted.
    """

    key: dict[str, Any]
    coefficients: dict[str, list[float]]
    held_out: dict[str, HeldOut]

    def predict_us(self, part: int, load: BranchLoad, config: FlexHybridConfig) -> float:
        """Microseconds of one part of a layer."""
        return float(terms(part, load, config) @ np.array(self.coefficients[PART_NAMES[part]]))

    def mismatch(self, key: dict[str, Any]) -> str:
        """In which facts it is not for `key`, as words; empty where it fits."""
        names = [name for name in {**key, **self.key} if key.get(name) != self.key.get(name)]
        return ", ".join(f"its {name} is {self.key.get(name)!r}, here {key.get(name)!r}" for name in names)

    def save(self, path: Path) -> None:
        """Write the profile as JSON, making the folder where it is missing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "BranchProfile":
        """The profile in a file that `save` wrote. Raises ValueError where it cannot be read or is none."""
        try:
            stored = json.loads(path.read_text())
            held_out = {name: HeldOut(**fields) for name, fields in stored["held_out"].items()}
            return cls(dict(stored["key"]), dict(stored["coefficients"]), held_out)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"profile {str(path)!r} cannot be read ({error}): take one with `flexops profile`"
            ) from error


def fit(samples: list[Sample], config: FlexHybridConfig, key: dict[str, Any], hold_out: int = 4) -> BranchProfile:
    """Fit the microseconds of every term to the samples, by least squares of the relative error.

    One sample in `hold_out` of a part, drawn at random, is left out to measure the error; the coefficients that are
    kept come from all samples. Raises ValueError where a part that was measured has too few samples.
    """
    coefficients, held_out = {}, {}
    for part, name in PART_NAMES.items():
        mine = [s for s in samples if s.part == part]
        if not mine:
            continue
        matrix = np.array([terms(part, s.load, config) for s in mine])
        times = np.array([s.us for s in mine])
        test = np.random.default_rng(0).permutation(len(mine)) % hold_out == 0
        if (~test).sum() < matrix.shape[1]:
            raise ValueError(
                f"{len(mine)} samples of {name} are too few to fit {matrix.shape[1]} terms: measure more batches"
            )
        relative, ones = matrix / times[:, None], np.ones(len(mine))
        errors = np.abs(relative[test] @ non_negative_least_squares(relative[~test], ones[~test]) - 1)
        spreads = [s.spread for s, t in zip(mine, test, strict=True) if t]
        held_out[name] = HeldOut(
            float(np.median(errors)), float(np.quantile(errors, 0.9)), float(np.median(spreads)), int(test.sum())
        )
        coefficients[name] = non_negative_least_squares(relative, ones).tolist()
    return BranchProfile(key, coefficients, held_out)


# --- where profiles are kept ----------------------------------------------------------------------------------


def device_name(device: torch.device) -> str:
    """The device as its maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def profile_key(config: FlexHybridConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """What a profile holds for: the shape of the model's layers, its dtype, the device and the library."""
    from .. import __version__  # here: the package's own file imports the runtime's users

    attention = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    ssm = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv", "mamba_chunk_size")
    parts = [name for name in ("attention", "ssm") if {name, "adaptive"} & set(config.layer_routes)]
    if any(config.has_ffn(layer_idx) for layer_idx in range(config.num_hidden_layers)):
        parts.append("ffn")
    return {
        **{name: getattr(config, name) for name in (*attention, *ssm, "intermediate_size", "num_hidden_layers")},
        "parts": parts,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device_name(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "format": FORMAT,
        "flexops": __version__,
        "torch": torch.__version__,
    }


def profile_path(key: dict[str, Any], folder: Path | None = None) -> Path:
    """The file of a profile: beside a model in its folder, or in the user's cache folder, $XDG_CACHE_HOME or ~/.cache.

    Its name tells shapes, devices and versions apart, so that a folder may hold the profiles of several.
    """
    if folder is None:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flexops" / "profiles"
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / f"{FILE_PREFIX}{digest[:16]}.json"


def find_profile(key: dict[str, Any], model: str | Path = "", file: str | Path | None = None) -> BranchProfile | None:
    """The stored profile for a key: beside the model, or else in the user's cache folder; None where there is none.

    model: its folder; a name that is no folder is passed over.  file: the one file to take instead.
    What is stored beside the model and cannot be used is logged, once, with the reason. Raises ValueError where `file`
    cannot be read, or is of another model or device.
    """
    if file is not None:
        profile = BranchProfile.load(Path(file))
        if wrong := profile.mismatch(key):
            raise ValueError(f"profile {str(file)!r} does not fit: {wrong}; take one with `flexops profile`")
        return profile
    paths = [path for path in (profile_path(key),) if path.is_file()]
    if model and Path(model).is_dir():
        beside = sorted(Path(model).glob(f"{FILE_PREFIX}*.json"))
        paths = [*sorted(beside, key=lambda path: path.name != profile_path(key).name), *paths]
    reasons = []
    for path in paths:
        try:
            profile = BranchProfile.load(path)
        except ValueError as error:
            reasons.append(str(error))
            continue
        if not (wrong := profile.mismatch(key)):
            return profile
        reasons.append(f"profile {str(path)!r} does not fit: {wrong}")
    if reasons:
        logger.warning("costs are estimated, not measured: %s", reasons[0])
    return None
