"""Greedy generation against transformers' own, on the same weights, on this machine.

A random BambaForCausalLM (12 layers, attention at 2, 6 and 10, hidden 512) and the same weights as a fixed layout of
ours. Sides are interleaved in one process; a check is the median over rounds of theirs / ours in seconds.
transformers' SSM fallback makes temporaries of the size of the states in every step, so glibc's malloc thresholds are
set for the whole process (it starts itself again with them): without, it looks many times slower than it is.

    python bench/generate_vs_transformers.py [--quick] [--json] [--only decode_fp32] [--llama-cpp FILE.gguf]
"""

import os
import random
import sys
import time
from collections.abc import Callable

if os.environ.get("MALLOC_TRIM_THRESHOLD_") is None:  # read by glibc when a process starts
    thresholds = {"MALLOC_MMAP_THRESHOLD_": str(1 << 34), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **thresholds})

import torch
from common import Report, arguments, interleave
from transformers import BambaConfig, BambaForCausalLM

from flexops import EngineConfig, FlexHybridModel
from flexops.runtime import Engine, SamplingParams

DECODE_TARGETS = {
    (torch.float32, 1): 3.0,
    (torch.float32, 8): 5.0,
    (torch.float32, 32): 7.0,
    (torch.bfloat16, 1): 4.0,
    (torch.bfloat16, 8): 4.0,
    (torch.bfloat16, 32): 5.5,
}
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
PROMPT = 16


def make_bamba(dtype: torch.dtype) -> BambaForCausalLM:
    """The model of the comparison, random weights."""
    config = BambaConfig(
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=2,
        attn_layer_indices=[2, 6, 10],
        mamba_n_heads=16,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        mamba_expand=2,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        initializer_range=0.05,
    )
    torch.manual_seed(0)
    return BambaForCausalLM(config).to(dtype).eval()


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(100, 32000) for _ in range(n)] for n in lengths]


def theirs(model: BambaForCausalLM, prompts: list[list[int]], new_tokens: list[int]) -> list[list[int]]:
    """One static, left-padded batch; runs to the longest output, gives each its own number of tokens."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    steps = max(new_tokens)
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=steps, min_new_tokens=steps, do_sample=False, pad_token_id=0
        )
    return [row[width : width + n] for row, n in zip(out.tolist(), new_tokens, strict=True)]


def ours(engine: Engine, prompts: list[list[int]], new_tokens: list[int]) -> list[list[int]]:
    """All requests at once, continuous batching."""
    ids = [engine.add_request(p, SamplingParams(max_new_tokens=n)) for p, n in zip(prompts, new_tokens, strict=True)]
    done = {}
    while engine.has_unfinished():
        done.update({output.request_id: output.token_ids for output in engine.step() if output.finished})
    return [done[i] for i in ids]


class Bench:
    """One report over the two sides in both dtypes."""

    def __init__(self) -> None:
        parser = arguments(__doc__)
        parser.add_argument("--only", help="run the checks whose names start so")
        parser.add_argument("--llama-cpp", metavar="GGUF", help="also run this model in llama-cpp-python")
        self.report = Report("generate_vs_transformers", parser)
        self.rounds = 3 if self.report.options.quick else 7
        self.models: dict[torch.dtype, tuple[BambaForCausalLM, Engine]] = {}

    def wanted(self, name: str) -> bool:
        return name.startswith(self.report.options.only or "")

    def sides(self, dtype: torch.dtype) -> tuple[BambaForCausalLM, Engine]:
        if dtype not in self.models:
            model = make_bamba(dtype)
            self.models[dtype] = (
                model,
                Engine(FlexHybridModel.from_model(model), EngineConfig(memory_bytes=2 << 30, context_cache=None)),
            )
        return self.models[dtype]

    def compare(
        self, name: str, target: float, tokens: int, their_run: Callable[[], object], our_run: Callable[[], object]
    ) -> None:
        """A check of seconds, theirs over ours; `tokens` turn seconds into tokens/s for the table."""
        times = interleave({"transformers": their_run, "flexops": our_run}, self.rounds)
        rates = {side: sorted(tokens / s for s in seconds) for side, seconds in times.seconds.items()}
        ratio = times.ratio("transformers", "flexops")
        self.report.check(name, ratio, target, noise=times.spread("transformers", "flexops"))
        self.report.data[name] = {
            side: {"tokens_per_s": values[len(values) // 2], "lowest": values[0], "highest": values[-1]}
            for side, values in rates.items()
        }
        row = [f"{values[len(values) // 2]:.0f} ({values[0]:.0f}-{values[-1]:.0f})" for values in rates.values()]
        self.report.table(name, ("", "transformers tok/s", "flexops tok/s", "ratio"), [("median (range)", *row, ratio)])

    def decode(self, dtype: torch.dtype, batch: int) -> None:
        """Decode tokens/s: the time of many tokens less the time of one, prefill included in both."""
        name = f"decode_{NAMES[dtype]}_b{batch}"
        if not self.wanted(name):
            return
        model, engine = self.sides(dtype)
        prompts = prompts_of([PROMPT] * batch, seed=batch)
        steps = 16 if self.report.options.quick else 32

        def timed(run: Callable[[list[int]], object]) -> Callable[[], float]:
            def measure() -> float:
                begin = time.perf_counter()
                run([1] * batch)
                middle = time.perf_counter()
                run([steps + 1] * batch)
                return (time.perf_counter() - middle) - (middle - begin)

            return measure

        sides = {
            "transformers": timed(lambda n: theirs(model, prompts, n)),
            "flexops": timed(lambda n: ours(engine, prompts, n)),
        }
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for run in sides.values():
            run()
        for done in range(self.rounds):
            for side in sides if done % 2 else reversed(sides):
                seconds[side].append(sides[side]())
        ratios = sorted(a / b for a, b in zip(seconds["transformers"], seconds["flexops"], strict=True))
        ratio = ratios[len(ratios) // 2]
        rates = {side: sorted(batch * steps / s for s in values) for side, values in seconds.items()}
        weights = sum(p.numel() for p in model.parameters()) * dtype.itemsize
        step_ms = 1e3 * batch / rates["flexops"][len(ratios) // 2]
        self.report.check(name, ratio, DECODE_TARGETS[dtype, batch], noise=(ratios[-1] - ratios[0]) / 2 / ratio)
        self.report.data[name] = {
            **{side: {"tokens_per_s": v[len(v) // 2], "lowest": v[0], "highest": v[-1]} for side, v in rates.items()},
            "step_ms": step_ms,
            "weight_bytes": weights,
            "weight_gb_per_s": weights / step_ms / 1e6,
        }
        row = [f"{v[len(v) // 2]:.1f} ({v[0]:.1f}-{v[-1]:.1f})" for v in rates.values()]
        columns = ("", "transformers tok/s", "flexops tok/s", "ratio", "step ms", "weights GB/s")
        self.report.table(name, columns, [("median (range)", *row, ratio, step_ms, weights / step_ms / 1e6)])

    def prefill(self, name: str, target: float, lengths: list[int]) -> None:
        """Time to the first token of all prompts together, in real tokens/s."""
        if not self.wanted(name):
            return
        model, engine = self.sides(torch.float32)
        prompts, ones = prompts_of(lengths, seed=sum(lengths)), [1] * len(lengths)
        self.compare(
            name, target, sum(lengths), lambda: theirs(model, prompts, ones), lambda: ours(engine, prompts, ones)
        )

    def run(self) -> None:
        quick = self.report.options.quick
        for dtype, batch in DECODE_TARGETS:
            if not quick or batch != 8:
                self.decode(dtype, batch)
        ragged = [64, 128, 192, 256, 320, 384, 448, 512]
        self.prefill("prefill_fp32_512", 1.7, [512])
        if not quick:
            self.prefill("prefill_fp32_2048", 1.7, [2048])
        self.prefill("prefill_fp32_ragged", 2.8, ragged)
        if self.wanted("requests_64") and not quick:
            self.requests()
        if self.wanted("tokens_equal_fp32"):
            model, engine = self.sides(torch.float32)
            prompts = prompts_of([5, 33, 64, 100], seed=9)
            same = [theirs(model, [p], [24])[0] == ours(engine, [p], [24])[0] for p in prompts]
            self.report.check("tokens_equal_fp32", sum(same) / len(same), 1.0)
        if self.report.options.llama_cpp:
            self.llama_cpp(self.report.options.llama_cpp)
        self.report.finish()

    def requests(self) -> None:
        """64 ragged requests to completion: static batches of 8 in order of arrival against continuous batching."""
        model, engine = self.sides(torch.float32)
        rng = random.Random(5)
        prompts = prompts_of([rng.randint(16, 512) for _ in range(64)], seed=5)
        outputs = [rng.randint(8, 256) for _ in range(64)]

        def static() -> None:
            for i in range(0, 64, 8):
                theirs(model, prompts[i : i + 8], outputs[i : i + 8])

        begin = time.perf_counter()
        static()
        middle = time.perf_counter()
        ours(engine, prompts, outputs)
        end = time.perf_counter()
        real = sum(map(len, prompts)) + sum(outputs)
        ratio = (middle - begin) / (end - middle)
        self.report.check("requests_64", ratio, 6.0)
        rates = {"transformers": real / (middle - begin), "flexops": real / (end - middle)}
        self.report.data["requests_64"] = {"real_tokens": real, "tokens_per_s": rates}
        columns = ("", "transformers tok/s", "flexops tok/s", "ratio")
        self.report.table("requests_64, one run", columns, [("real tokens", *rates.values(), ratio)])

    def llama_cpp(self, path: str) -> None:
        """llama.cpp's decode rate of a model of equal size at batch 1, where llama-cpp-python is installed."""
        from llama_cpp import Llama

        llama = Llama(path, n_ctx=4096, verbose=False)
        prompt = prompts_of([PROMPT])[0]
        llama.reset()
        llama.eval(prompt)
        begin, steps = time.perf_counter(), 64
        for _ in range(steps):
            llama.eval([llama.sample(temp=0.0)])
        rate = steps / (time.perf_counter() - begin)
        self.report.data["llama_cpp_decode_b1"] = {"tokens_per_s": rate, "file": os.path.basename(path)}
        self.report.say(f"llama.cpp decode, batch 1: {rate:.1f} tok/s")


if __name__ == "__main__":
    Bench().run()
