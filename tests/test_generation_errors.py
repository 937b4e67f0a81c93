"""What `generate` refuses before any work, with the reason; and that a call that fails leaves nothing behind."""

import re
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from flexops import EngineConfig, FlexHybridModel
from flexops import kernels as fk
from flexops.generation import engine_for
from tests import tiny

IDS = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]])
MASK = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])


@pytest.fixture(scope="module", autouse=True)
def cpu_operators():
    with fk.backend("cpu"):
        yield


@pytest.fixture(scope="module")
def shared() -> FlexHybridModel:
    model = tiny.make_model()
    engine_for(model, EngineConfig(memory_bytes=1 << 21, check_integrity=True))
    return model


@pytest.fixture
def model(shared: FlexHybridModel):
    """The model, whose engine must be as it was when the test ends, and still work."""
    engine = engine_for(shared)
    engine.clear_cache()
    free = engine.stats()["pages_free"]
    yield shared
    assert engine_for(shared) is engine
    engine.clear_cache()
    assert not engine.has_unfinished() and engine.stats()["pages_free"] == free
    assert shared.generate(IDS, attention_mask=MASK, max_new_tokens=2, eos_token_id=None).shape == (2, 6)


class Raise(LogitsProcessor, StoppingCriteria, BaseStreamer):
    """A processor, criterion or streamer that fails at its third call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == 3:
            raise KeyError("mine")
        return args[1] if isinstance(args[1], torch.Tensor) else torch.tensor([False])

    def put(self, value: torch.Tensor) -> None:
        self(None, None)

    def end(self) -> None: ...


class TestBadInput:
    @pytest.mark.parametrize(
        "kwargs, message",
        [
            (dict(inputs=torch.empty(1, 0, dtype=torch.int64)), r"shape \[1, 0\].*at least one token"),
            (dict(inputs=torch.empty(0, 3, dtype=torch.int64)), r"shape \[0, 3\].*at least one token"),
            (dict(inputs=[[1], []]), r"integer tensor \[batch, tokens\], got \[\[1\], \[\]\]"),
            (dict(inputs=""), r"integer tensor \[batch, tokens\], got ''"),
            (dict(inputs=IDS[0]), r"integer tensor \[batch, tokens\], got .*\[4\]"),
            (dict(inputs=IDS.float()), r"integer tensor .*float32"),
            (dict(inputs=torch.tensor([[5, 258]])), r"must lie in \[0, 258\), got 5\.\.258"),
            (dict(inputs=torch.tensor([[-1, 5]])), r"must lie in \[0, 258\), got -1\.\.5"),
            (dict(attention_mask=MASK[:, :3]), r"shape of input_ids, \[2, 4\], got .*\[2, 3\]"),
            (dict(attention_mask=MASK[:1]), r"shape of input_ids, \[2, 4\], got .*\[1, 4\]"),
            (dict(attention_mask=MASK * torch.tensor([[1], [0]])), r"row 1 of attention_mask has no token"),
            (dict(max_new_tokens=0), "max_new_tokens"),
            (dict(max_new_tokens=-3), "max_new_tokens"),
            (dict(max_length=4), "max_length"),
            (dict(inputs=torch.full((1, 600), 5)), r"600 tokens.*exceeds.*512"),
            (dict(max_new_tokens=509), r"4 tokens.*509.*513 exceeds.*512"),
            (dict(do_sample=True, temperature=0.0), "temperature"),
            (dict(do_sample=True, temperature=float("nan")), "temperature"),
            (dict(do_sample=True, top_p=-0.5), "top_p"),
            (dict(num_return_sequences=2), "num_return_sequences"),
            (dict(no_such_argument=1), "no_such_argument"),
            (dict(labels=IDS), "labels"),
            (dict(routing="soft"), "routing"),
            (dict(layout="mamba"), "layout='mamba'"),
            (dict(layout=7), "layout=7"),
            (dict(layout=["ssm"]), r"layout=\['ssm'\] .* 3 layers"),
            (dict(layout=["ssm", None, None]), "layout has 3 entries for 2 requests"),
            (dict(gate_bias=[0.0, 1.0, 2.0]), "gate_bias has 3 entries for 2 prompts"),
            (dict(gate_bias=float("nan")), "gate_bias=nan"),
            (dict(stop_strings=["x"]), "tokenizer"),
        ],
        ids=lambda value: None if isinstance(value, dict) else re.sub(r"\W+", "_", value)[:30],
    )
    def test_value_error(self, model, kwargs, message) -> None:
        call = {"inputs": IDS, "attention_mask": None, "max_new_tokens": 4} | kwargs
        if "max_length" in kwargs:
            call.pop("max_new_tokens")
        before = engine_for(model).stats()
        with pytest.raises(ValueError, match=message):
            model.generate(**call)
        after = engine_for(model).stats()
        assert after["steps"] == before["steps"] and after["prompt_tokens"] == before["prompt_tokens"]

    def test_no_input_and_no_bos(self, model) -> None:
        with pytest.raises(ValueError, match="bos_token_id"):
            model.generate(max_new_tokens=2)

    def test_a_request_that_can_never_fit(self) -> None:
        model = tiny.make_model()
        engine_for(model, EngineConfig(memory_bytes=1 << 16))
        assert model.generate(IDS, max_new_tokens=2).shape == (2, 6)
        with pytest.raises(ValueError, match="pages"):
            model.generate(IDS, max_new_tokens=500)
        assert not engine_for(model).has_unfinished()

    def test_eos_without_a_pad_token(self, model) -> None:
        criteria = StoppingCriteriaList([transformers.EosTokenCriteria(5)])
        config = GenerationConfig(max_new_tokens=3)
        saved, model.generation_config = model.generation_config, GenerationConfig()
        try:
            with pytest.raises(ValueError, match="pad_token_id is not set"):
                model.generate(IDS, generation_config=config, stopping_criteria=criteria)
        finally:
            model.generation_config = saved


class TestUnsupported:
    """Named, with the reason, whichever way it is asked for."""

    @pytest.mark.parametrize(
        "kwargs, message",
        [
            (dict(num_beams=4), r"num_beams=4 .*beam search.*do_sample=True"),
            (dict(num_beams=4, do_sample=True), r"num_beams=4 .*beam search"),
            (dict(num_beams=4, num_beam_groups=2, diversity_penalty=1.0), r"num_beams=4 .*beam search"),
            (dict(num_beams=2, force_words_ids=[[3]]), "beam search"),
            (dict(penalty_alpha=0.6, top_k=4), r"penalty_alpha=0.6 .*contrastive search"),
            (dict(dola_layers="high"), r"dola_layers='high' .*DoLa"),
            (dict(prompt_lookup_num_tokens=3), r"prompt_lookup_num_tokens=3 .*assisted decoding"),
            (dict(assistant_early_exit=1), r"assistant_early_exit=1 .*assisted decoding"),
            (dict(guidance_scale=1.5), r"guidance_scale=1.5 .*classifier-free guidance"),
            (dict(output_attentions=True), r"output_attentions=True .*attention weights"),
            (dict(output_hidden_states=True), r"output_hidden_states=True"),
        ],
        ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
    )
    def test_as_argument_or_in_a_config(self, model, kwargs, message) -> None:
        with pytest.raises(ValueError, match=message):
            model.generate(IDS, max_new_tokens=4, **kwargs)
        with pytest.raises(ValueError, match=message):
            model.generate(IDS, generation_config=GenerationConfig(max_new_tokens=4, **kwargs))

    def test_in_the_models_own_config(self, model) -> None:
        saved, model.generation_config = model.generation_config, GenerationConfig(num_beams=3)
        try:
            with pytest.raises(ValueError, match=r"num_beams=3 .*beam search"):
                model.generate(IDS, max_new_tokens=4)
        finally:
            model.generation_config = saved

    def test_harmless_values_pass(self, model) -> None:
        plain = model.generate(IDS, max_new_tokens=3)
        config = dict(num_beams=1, guidance_scale=None, output_attentions=False, penalty_alpha=None)
        assert model.generate(IDS, max_new_tokens=3, **config).tolist() == plain.tolist()

    @pytest.mark.parametrize(
        "name, value",
        [
            ("assistant_model", object()),
            ("custom_generate", "someone/loop"),
            ("custom_generate", lambda model, *args, **kwargs: None),
            ("synced_gpus", True),
            ("inputs_embeds", torch.zeros(2, 4, 32)),
            ("position_ids", torch.arange(4)[None].expand(2, -1)),
            ("past_key_values", transformers.DynamicCache()),
            ("cache_implementation", "paged"),
        ],
        ids=["assistant_model", "custom_repo", "custom_callable", "synced", "embeds", "positions", "past", "paged"],
    )
    def test_arguments(self, model, name, value) -> None:
        with pytest.raises(ValueError, match=rf"{name}=.* is not supported: \w+"):
            model.generate(IDS, max_new_tokens=4, **{name: value})

    def test_guidance_as_a_processor(self, model) -> None:
        guidance = transformers.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, model)
        with pytest.raises(ValueError, match=r"UnbatchedClassifierFreeGuidance.*second prompt"):
            model.generate(IDS, max_new_tokens=4, logits_processor=LogitsProcessorList([guidance]))

    def test_a_text_streamer_takes_one_row(self, model) -> None:
        with pytest.raises(ValueError, match="batch size 1"):
            model.generate(IDS, max_new_tokens=4, streamer=transformers.TextStreamer(tiny.make_tokenizer()))


class TestFailuresOnTheWay:
    """What the caller's own code raises comes out of generate, and the engine forgets the call (see `model`)."""

    @pytest.mark.parametrize("where", ["logits_processor", "stopping_criteria", "streamer"])
    def test_the_callers_error_comes_out(self, model, where) -> None:
        value = Raise()
        lists = {"logits_processor": LogitsProcessorList, "stopping_criteria": StoppingCriteriaList}
        with pytest.raises(KeyError, match="mine"):
            model.generate(IDS, max_new_tokens=8, **{where: lists[where]([value]) if where in lists else value})
        assert value.calls >= 3

    def test_scores_of_the_wrong_shape(self, model) -> None:
        class Flat(LogitsProcessor):
            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                return scores[0]

        with pytest.raises(ValueError, match=r"shape \[1, 258\], got \[258\]"):
            model.generate(IDS, max_new_tokens=4, logits_processor=LogitsProcessorList([Flat()]))

    def test_every_token_ruled_out(self, model) -> None:
        class Nothing(LogitsProcessor):
            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                return torch.full_like(scores, -torch.inf)

        with pytest.raises(ValueError, match="no token can be sampled"):
            model.generate(IDS, max_new_tokens=4, do_sample=True, logits_processor=LogitsProcessorList([Nothing()]))

    def test_generate_inside_generate(self, model) -> None:
        class Inside(StoppingCriteria):
            def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
                return model.generate(input_ids, max_new_tokens=1) is None

        with pytest.raises(RuntimeError, match="of a running generate"):
            model.generate(IDS, max_new_tokens=4, stopping_criteria=StoppingCriteriaList([Inside()]))


def test_an_engine_that_fails_in_a_step_is_replaced() -> None:
    model = tiny.make_model()
    wanted = model.generate(IDS, max_new_tokens=3)
    engine = engine_for(model)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("no more")

    engine.executor.run = fail
    with pytest.raises(MemoryError, match="no more"):
        model.generate(IDS, max_new_tokens=3)
    assert engine_for(model) is not engine
    assert model.generate(IDS, max_new_tokens=3).tolist() == wanted.tolist()
