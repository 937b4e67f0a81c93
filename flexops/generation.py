"""`model.generate`: transformers' contract on top of the engine.

transformers merges the generation config, builds the logits processors and stopping criteria and checks arguments;
`FlexHybridModel` then hands over to `sample`. Padding is taken out before anything sees it and put back at the exit, so
a row is what it would be alone. max_length and min_length count the padding, as in transformers.
"""

import inspect
import reprlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .config import EngineConfig
from .models.gate import PrefillGate
from .models.layout import ROUTE_NAMES, Layout, resolve_layout
from .models.mixers import AttentionMixer, Mamba2Mixer, RMSNorm, SwiGLU
from .models.modeling import FlexHybridLayer, FlexHybridModel
from .processors import BatchContext, RowContext, Stops, processor_for_row, recorder, split_processors
from .runtime import Engine, RequestOutput, SamplingParams

_BEAMS = "beam search overwrites sequences with one another, SSM states and all; use greedy search or do_sample=True"
_ASSISTED = "assisted decoding takes tokens back, and an SSM state cannot be taken back; leave it out"
_OWN_CACHE = "the engine keeps its own cache and starts every call from the prompt; pass the whole text as input_ids"

# argument -> (values that ask for nothing, why all others are refused)
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((None, 1), _BEAMS),
    "num_beam_groups": ((None, 1), _BEAMS),
    "constraints": ((None,), _BEAMS),
    "force_words_ids": ((None,), _BEAMS),
    "penalty_alpha": ((None, 0), "contrastive search compares the hidden states of candidates; use top_k or top_p"),
    "dola_layers": ((None,), "DoLa needs the logits of inner layers; leave it out"),
    "assistant_model": ((None,), _ASSISTED),
    "prompt_lookup_num_tokens": ((None,), _ASSISTED),
    "assistant_early_exit": ((None,), _ASSISTED),
    "use_mtp": ((None, False), _ASSISTED),
    "guidance_scale": ((None, 1), "classifier-free guidance runs a second prompt in step with every row; leave it out"),
    "custom_generate": ((None,), "a decoding loop of its own needs a cache that forward takes; use processors instead"),
    "synced_gpus": ((None, False), "the engine needs all weights on its device; gather them first"),
    "output_attentions": ((None, False), "the operators never form the attention weights; leave it out"),
    "output_hidden_states": ((None, False), "the engine does not keep them; call forward with hooks on the layers"),
    "inputs_embeds": ((None,), "the engine starts from token ids; pass input_ids"),
    "position_ids": ((None,), "positions follow from attention_mask; leave it out"),
    "past_key_values": ((None,), _OWN_CACHE),
    "cache": ((None,), _OWN_CACHE),
}
# what transformers passes along and changes nothing here
_NO_EFFECT = {"use_cache", "tokenizer", "assistant_tokenizer", "logits_to_keep"}


@dataclass
class FlexGenerateOutput(GenerateDecoderOnlyOutput):
    """What `generate(..., return_dict_in_generate=True)` returns.

    sequences: int64 [B, prompt + new tokens], padded on the right.  scores, logits: a tuple with fp32 [B, vocab] per
    new token, where asked for; a row that has ended gives its pad token with certainty (0, all others -inf).
    layouts: int32 [B, num_layers], the routes taken.  gate_margins: fp32 [B, num_layers], |p_attn - p_ssm|, 1 where
    the route was given.
    """

    layouts: Tensor | None = None
    gate_margins: Tensor | None = None


def check_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse what `generate(*args, **kwargs)` is asked for and cannot do. Raises ValueError that gives the reason."""
    bound = inspect.signature(GenerationMixin.generate).bind_partial(None, *args, **kwargs).arguments
    arguments = {**bound.pop("kwargs", {}), **bound}
    _refuse(arguments.get)
    if arguments.get("cache_implementation") == "paged":
        raise ValueError(f"cache_implementation='paged' is not supported: {_OWN_CACHE}")
    input_ids = arguments["inputs"] if arguments.get("inputs") is not None else arguments.get("input_ids")
    if input_ids is None:
        return  # transformers starts from bos_token_id, or says that it needs one
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.is_floating_point():
        raise ValueError(f"input_ids must be an integer tensor [batch, tokens], got {_shown(input_ids)}")
    if not input_ids.numel():
        raise ValueError(
            f"input_ids has shape {list(input_ids.shape)}: give every prompt at least one token, such as the bos token"
        )
    mask = arguments.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != input_ids.shape):
        raise ValueError(
            f"attention_mask must have the shape of input_ids, {list(input_ids.shape)}, got {_shown(mask)}"
        )


def check_config(config: GenerationConfig) -> None:
    """Refuse what a merged generation config asks for and `generate` cannot do. Raises ValueError."""
    _refuse(lambda name: getattr(config, name, None))


def _refuse(value_of: Callable[[str], Any]) -> None:
    for name, (harmless, reason) in _REFUSED.items():
        value = value_of(name)
        if not any(value is allowed or (isinstance(value, int | float) and value == allowed) for allowed in harmless):
            raise ValueError(f"{name}={_shown(value)} is not supported: {reason}")


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {value.dtype} {list(value.shape)}"
    return reprlib.repr(value) if isinstance(value, int | float | str | list) else f"a {type(value).__name__}"


@dataclass
class _Row:
    """A row of the batch as it grows."""

    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    layout: tuple[int, ...] = ()
    gate_margins: tuple[float, ...] = ()
    finished: bool = False

    def add(self, output: RequestOutput) -> None:
        self.tokens += output.new_token_ids
        self.logits += output.logits or []
        self.scores += output.scores or []
        self.layout, self.gate_margins = output.layout, output.gate_margins
        self.finished = output.finished


@dataclass
class _Job:
    """A request to the engine, and the rows that its samples fill."""

    prompt: list[int]
    params: SamplingParams
    rows: list[_Row]
    layout: Layout = None
    gate_bias: float = 0.0


def sample(
    model: FlexHybridModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: Any = None,
    attention_mask: Tensor | None = None,
    layout: Any = None,
    gate_bias: float | list[float] = 0.0,
    **model_kwargs: Any,
) -> Tensor | FlexGenerateOutput:
    """Generate for a padded batch: the seam `_sample` under transformers' `generate`.

    input_ids: int64 [B, S], each prompt `num_return_sequences` times, as transformers repeats it.  attention_mask:
    [B, S], 0 at padding.  layout, gate_bias: for all prompts, or a list with an entry per prompt (before repetition).
    Returns int64 [B, S + new tokens], or a FlexGenerateOutput with `return_dict_in_generate`; sets
    `model.last_layouts`, int32 [B, num_layers], the routes taken.

    Raises ValueError for ids out of range, a row without a token, or what cannot fit. What a processor, criterion or
    streamer of the caller raises is passed on, and the engine forgets the call.
    """
    unknown = [name for name, value in model_kwargs.items() if value is not None and name not in _NO_EFFECT]
    if synced_gpus or unknown:
        raise ValueError(f"{unknown or ['synced_gpus']} are not arguments of this model's generate: leave them out")
    config = generation_config
    stops = Stops(stopping_criteria, len(input_ids))
    pad = config._pad_token_tensor
    if stops.pads and pad is None:
        raise ValueError("an eos token ends rows early, but pad_token_id is not set: give one to fill them up with")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    prompts = _unpad(input_ids, mask.bool(), model.config.vocab_size)
    repeats = config.num_return_sequences or 1
    batch = BatchContext(input_ids.shape[1], (mask != 0).int().argmax(1), stops.token_ids, bool(config.do_sample))
    # criteria that look at the scores get them from a processor behind all others
    recorded = bool(config.return_dict_in_generate and config.output_scores and stops.read_scores)
    settings, own = split_processors(list(logits_processor), batch, read_last=recorded)
    jobs = _jobs(prompts, input_ids, repeats, settings, own, recorded, stops, config)
    _set_routing(jobs, model, repeats, layout, gate_bias)
    rows = [row for job in jobs for row in job.rows]
    pad_id = 0 if pad is None else int(pad)
    with _claimed(model) as slot:
        _run(slot, slot.current(model), jobs, _Stream(streamer, rows, stops, pad_id))
    return _result(model, input_ids, rows, stops, pad_id, config)


def _unpad(input_ids: Tensor, mask: Tensor, vocab_size: int) -> list[list[int]]:
    """The real tokens of each row of input_ids [B, S]. Raises ValueError for a row without any or ids out of range."""
    if not mask.any(1).all():
        row = int((~mask.any(1)).nonzero()[0])
        raise ValueError(f"row {row} of attention_mask has no token: remove the row or give it one")
    low, high = (int(bound) for bound in input_ids[mask].aminmax())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"input_ids must lie in [0, {vocab_size}), got {low}..{high}: use the tokenizer that belongs to the model"
        )
    return [row[keep].tolist() for row, keep in zip(input_ids.cpu(), mask.cpu(), strict=True)]


def _jobs(
    prompts: list[list[int]],
    input_ids: Tensor,
    repeats: int,
    settings: dict[str, Any],
    own: list[Any],
    recorded: bool,
    stops: Stops,
    config: GenerationConfig,
) -> list[_Job]:
    """The requests that fill the rows; the samples of a prompt share one where nothing is called row by row."""
    shared = repeats if not own and not stops.others else 1
    num_jobs = len(prompts) // shared
    # drawn only for sampling, as in transformers: greedy calls leave torch's generator alone
    seeds = torch.randint(2**63 - 1, (num_jobs,)).tolist() if config.do_sample else [0] * num_jobs
    reported = bool(config.return_dict_in_generate)
    max_new_tokens = max(1, stops.max_length - input_ids.shape[1])
    settings = settings | {"min_new_tokens": min(settings.get("min_new_tokens", 0), max_new_tokens)}
    jobs = []
    for i, seed in zip(range(0, len(prompts), shared), seeds, strict=True):
        ids = torch.tensor([prompts[i]], device=input_ids.device)
        row = RowContext(i, i // repeats, ids, input_ids.shape[1] - ids.shape[1])
        processors = [processor_for_row(processor, row) for processor in own]
        scores: list[Tensor] | None = [] if recorded else None
        if scores is not None:
            processors.append(recorder(scores))
        params = SamplingParams(
            **settings,
            max_new_tokens=max_new_tokens,
            seed=seed,
            n=shared,
            stop_token_ids=stops.token_ids,
            keep_logits=reported and bool(config.output_logits),
            keep_scores=reported and bool(config.output_scores),
            logits_processors=tuple(processors),
            stop_checks=stops.checks(row, scores),
        )
        jobs.append(_Job(prompts[i], params, [_Row() for _ in range(shared)]))
    return jobs


def _set_routing(jobs: list[_Job], model: FlexHybridModel, repeats: int, layout: Any, gate_bias: Any) -> None:
    """Give every job the layout and the gate bias of its prompt. Raises ValueError where their number is wrong."""
    if not (layout is None or isinstance(layout, str | list | tuple)):
        raise ValueError(f"layout={layout!r} must be None, 'attention', 'ssm', or a list")
    num_prompts = sum(len(job.rows) for job in jobs) // repeats
    codes = resolve_layout(layout, model.config, num_prompts)
    biases = list(gate_bias) if isinstance(gate_bias, list | tuple) else [gate_bias] * num_prompts
    if len(biases) != num_prompts:
        raise ValueError(f"gate_bias has {len(biases)} entries for {num_prompts} prompts: give one number, or one each")
    names = {code: name for name, code in ROUTE_NAMES.items()}
    for i, job in enumerate(jobs):
        prompt = i * len(job.rows) // repeats
        job.gate_bias = float(biases[prompt])
        job.layout = None if codes is None else [names[code] for code in codes[prompt].tolist()]


class _Stream:
    """Feeds a streamer as transformers does: per step one token of every row, pads for those that have ended."""

    def __init__(self, streamer: Any, rows: list[_Row], stops: Stops, pad_id: int) -> None:
        self.streamer, self.rows, self.stops, self.pad_id = streamer, rows, stops, pad_id
        self.done = 0

    def advance(self) -> None:
        """Hand over the steps that every row has reached."""
        if self.streamer is None:
            return
        longest = max(len(row.tokens) for row in self.rows)
        while self.done < longest and all(row.finished or len(row.tokens) > self.done for row in self.rows):
            if self.stops.length is not None and self.done >= self.stops.length:
                return
            step = [row.tokens[self.done] if self.done < len(row.tokens) else self.pad_id for row in self.rows]
            self.streamer.put(torch.tensor(step))
            self.done += 1


def _run(slot: "_EngineSlot", engine: Engine, jobs: list[_Job], stream: _Stream) -> None:
    """Run all jobs to their end. Whatever is raised, the engine is left without them."""
    running: dict[tuple[int, int], _Row] = {}
    try:
        for job in jobs:
            request_id = engine.add_request(job.prompt, job.params, job.layout, job.gate_bias)
            running |= {(request_id, sample): row for sample, row in enumerate(job.rows)}
        while running:
            try:
                outputs = engine.step()
            except BaseException:
                slot.engine = None  # it stopped in the middle of a step: the next call makes another
                raise
            for output in outputs:
                row = running[output.request_id, output.sample]
                row.add(output)
                if output.error is not None:
                    raise output.error
                if row.finished:
                    del running[output.request_id, output.sample]
            stream.advance()
        if stream.streamer is not None:
            stream.streamer.end()
    finally:
        if slot.engine is not None:
            for request_id in {request_id for request_id, _ in running}:
                engine.abort(request_id)


def _result(
    model: FlexHybridModel, input_ids: Tensor, rows: list[_Row], stops: Stops, pad_id: int, config: GenerationConfig
) -> Tensor | FlexGenerateOutput:
    """The rows as transformers returns them, on the device of input_ids."""
    device = input_ids.device
    steps = stops.length or max(len(row.tokens) for row in rows)
    new_tokens = [(row.tokens + [pad_id] * steps)[:steps] for row in rows]
    sequences = torch.cat([input_ids, torch.tensor(new_tokens, dtype=input_ids.dtype, device=device)], dim=1)
    model.last_layouts = torch.tensor([row.layout for row in rows], dtype=torch.int32, device=device)
    if not config.return_dict_in_generate:
        return sequences
    ended = torch.full((model.config.vocab_size,), -torch.inf, device=device)
    if 0 <= pad_id < len(ended):
        ended[pad_id] = 0.0

    def per_step(kept: list[list[Tensor]]) -> tuple[Tensor, ...]:
        return tuple(
            torch.stack([row[step].to(device) if step < len(row) else ended for row in kept]) for step in range(steps)
        )

    return FlexGenerateOutput(
        sequences=sequences,
        scores=per_step([row.scores for row in rows]) if config.output_scores else None,
        logits=per_step([row.logits for row in rows]) if config.output_logits else None,
        layouts=model.last_layouts,
        gate_margins=torch.tensor([row.gate_margins for row in rows], dtype=torch.float32, device=device),
    )


class _EngineSlot:
    """A model's engine, and what the weights were when it was made. Copies and pickles of a model get an empty one."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config
        self.engine: Engine | None = None
        self.weights: object = None
        self.lock = threading.Lock()
        self.owner: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _EngineSlot, (self.config,)

    def current(self, model: FlexHybridModel) -> Engine:
        """The engine of the model as it is now."""
        _check_modules(model)
        weights = _fingerprint(model)
        if self.engine is None or self.weights != weights:
            self.engine = None  # gives its memory back first
            # made under inference_mode, its memory could only ever be written to under inference_mode
            with torch.inference_mode(False):
                self.engine, self.weights = Engine(model, self.config), weights
        return self.engine


def engine_for(model: FlexHybridModel, config: EngineConfig | None = None) -> Engine:
    """The engine behind `model.generate`: made when first needed, and made anew when the weights have changed.

    It belongs to generate: requests of your own need an Engine of your own.
    config: settings for it from now on; None keeps those it has. Raises ValueError for a model with layers that the
    engine does not know.
    """
    slot = _slot(model)
    with _claimed(model):
        if config is not None and config != slot.config:
            slot.config, slot.engine = config, None
        return slot.current(model)


def _slot(model: FlexHybridModel) -> _EngineSlot:
    return model.__dict__.setdefault("_engine_slot", _EngineSlot())


@contextmanager
def _claimed(model: FlexHybridModel) -> Iterator[_EngineSlot]:
    """The model's engine for this thread alone; calls from other threads wait."""
    slot = _slot(model)
    if slot.owner == threading.get_ident():
        raise RuntimeError("generate was called from a processor, criterion or streamer of a running generate")
    with slot.lock:
        slot.owner = threading.get_ident()
        try:
            yield slot
        finally:
            slot.owner = None


_KNOWN_MODULES = {
    FlexHybridLayer,
    AttentionMixer,
    Mamba2Mixer,
    PrefillGate,
    RMSNorm,
    SwiGLU,
    nn.Linear,
    nn.Embedding,
    nn.Conv1d,
    nn.ModuleList,
}


def _check_modules(model: FlexHybridModel) -> None:
    """The engine reads weights, not modules: a layer that computes something else must not pass unseen."""
    for name, module in model.named_modules():
        if module is not model and type(module) not in _KNOWN_MODULES:
            raise ValueError(
                f"generate does not know {type(module).__name__} at {name!r}: merge adapters into the weights "
                "(merge_and_unload) and load weights unquantised"
            )
    if any(p.is_meta for p in model.parameters()):
        raise ValueError("some weights are on the meta device: load the whole model onto one device")


def _fingerprint(model: FlexHybridModel) -> object:
    """A value that changes when the weights or the config do.

    Version counters would not do: fused optimisers, transformers' default among them, and writes through `.data` leave
    them as they are. So the contents are summed, at the cost of reading the weights once.
    """
    parameters = list(model.parameters())
    where = [(p.data_ptr(), p.dtype, p.shape) for p in parameters]
    digests = torch.stack([_digest(p.detach()).to(parameters[0].device) for p in parameters]).tolist()
    return where, digests, model.config.to_dict()


def _digest(weight: Tensor) -> Tensor:
    """An int64 that depends on every bit of the weight and, in steps of 512 bytes, on their order."""
    data = weight.contiguous().flatten().view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() // 512 * 512
    sums = data[:whole].view(torch.int64).view(-1, 64).sum(1)
    sums = torch.cat([sums, data[whole:].long()])
    return (sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum()
