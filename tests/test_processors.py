"""transformers' processors and criteria through `generate`: each row is treated as transformers treats it alone."""

import copy
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TypicalLogitsWarper,
)

from flexops import FlexHybridModel
from flexops import kernels as fk
from flexops.generation import engine_for
from flexops.models.loading import from_model
from tests import tiny
from tests.generation_cases import PAD, SMALL, VOCAB, Shift, StopOn, both, greedy_tokens, make_llama, padded


@pytest.fixture(scope="module", autouse=True)
def cpu_operators():
    with fk.backend("cpu"):
        yield


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return make_llama()


@pytest.fixture(scope="module")
def ours(llama: LlamaForCausalLM) -> FlexHybridModel:
    model = from_model(llama)
    engine_for(model, SMALL)
    return model


class TestProcessors:
    """Settings, built-in processors that are called row by row, and user-made ones: tokens equal transformers'."""

    CASES = {
        "repetition_penalty": dict(repetition_penalty=1.8),
        "repetition_reward": dict(repetition_penalty=0.6),
        "ngram": dict(no_repeat_ngram_size=2),
        "bad_words": dict(bad_words_ids=[[5], [9], [11, 12]]),
        "suppress": dict(suppress_tokens=list(range(2, 20))),
        "bias": dict(sequence_bias={(4,): 8.0, (6, 7): 3.0}),
        "bias_before_penalty": dict(sequence_bias={(4,): 8.0}, repetition_penalty=1.5),
        "several": dict(repetition_penalty=1.3, no_repeat_ngram_size=3, min_new_tokens=3, eos_token_id=4),
        "forced_eos": dict(forced_eos_token_id=44),
        "begin_suppress": dict(begin_suppress_tokens=list(range(2, 30))),
        "decay": dict(exponential_decay_length_penalty=(2, 1.9), eos_token_id=8),
        "valid_normalised": dict(remove_invalid_values=True, renormalize_logits=True),
        "encoder_penalty": dict(encoder_repetition_penalty=1.5),
        "encoder_ngram": dict(encoder_no_repeat_ngram_size=2),
        "users": dict(logits_processor=LogitsProcessorList([Shift()])),
        "users_behind_penalty": dict(logits_processor=LogitsProcessorList([Shift()]), repetition_penalty=1.4),
        "users_first": dict(
            logits_processor=LogitsProcessorList([Shift(), transformers.RepetitionPenaltyLogitsProcessor(1.4)])
        ),
    }

    @pytest.mark.parametrize("name", CASES)
    def test_each_row_is_transformers_solo_run(self, llama, ours, name) -> None:
        kwargs, inputs, lengths = self.CASES[name], padded(), (3, 9, 1, 6)
        got = ours.generate(**inputs, max_new_tokens=10, **copy.deepcopy(kwargs)).tolist()
        for row, length in enumerate(lengths):
            prompt = inputs["input_ids"][row : row + 1, 9 - length :]
            solo = llama.generate(prompt, max_new_tokens=10, **copy.deepcopy(kwargs))[0].tolist()
            assert got[row][9 - length :][: len(solo)] == solo
            assert set(got[row][9 - length + len(solo) :]) <= {PAD}
        if name not in ("valid_normalised", "encoder_ngram"):
            assert [row[9:] for row in got] != greedy_tokens(llama, steps=10, **inputs)  # it had something to change

    @pytest.mark.parametrize("name", CASES)
    def test_a_batch_without_padding_is_transformers_batch(self, llama, ours, name) -> None:
        both(llama, ours, **padded((5, 5, 5)), max_new_tokens=10, **self.CASES[name])

    def test_prefix_function(self, llama, ours) -> None:
        def allowed(prompt: int, ids: torch.Tensor) -> list[int]:
            return [(int(ids[-1]) * 7 + prompt + k) % 59 + 2 for k in range(3)]

        both(llama, ours, **padded(), max_new_tokens=10, prefix_allowed_tokens_fn=allowed)

    def test_forced_bos(self, llama, ours) -> None:
        both(llama, ours, input_ids=torch.tensor([[5], [9]]), max_new_tokens=4, forced_bos_token_id=17)

    def test_a_watermark(self, llama, ours) -> None:
        config = transformers.WatermarkingConfig(bias=4.0)
        both(llama, ours, **padded((4, 4)), max_new_tokens=8, watermarking_config=config)

    def test_a_synthid_watermark_keeps_rows_apart(self, llama, ours) -> None:
        config = transformers.SynthIDTextWatermarkingConfig(keys=[5, 6, 7], ngram_len=3)
        both(llama, ours, **padded((4, 4, 4)), max_new_tokens=8, watermarking_config=config)

    def test_users_see_their_row_without_padding(self, ours) -> None:
        seen = []

        class Spy(LogitsProcessor):
            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                seen.append((input_ids.tolist(), tuple(scores.shape), scores.dtype))
                return scores

        inputs = padded((3, 5))
        out = ours.generate(**inputs, max_new_tokens=2, logits_processor=LogitsProcessorList([Spy()]))
        rows = [out[0, 2:].tolist(), out[1].tolist()]
        wanted = [row[:n] for row, length in zip(rows, (3, 5), strict=True) for n in (length, length + 1)]
        assert sorted(ids[0] for ids, _, _ in seen) == sorted(wanted)
        assert {shape for _, shape, _ in seen} == {(1, VOCAB)} and {dtype for *_, dtype in seen} == {torch.float32}

    def test_a_users_instance_replaces_the_built_in_one(self, llama, ours) -> None:
        custom = LogitsProcessorList([transformers.RepetitionPenaltyLogitsProcessor(3.0)])
        both(llama, ours, **padded((4, 4)), max_new_tokens=8, repetition_penalty=1.1, logits_processor=custom)

    def test_ignoring_the_prompt_in_the_penalty(self, llama, ours) -> None:
        inputs = padded()

        def ignoring(length: int) -> LogitsProcessorList:
            return LogitsProcessorList(
                [transformers.RepetitionPenaltyLogitsProcessor(5.0, prompt_ignore_length=length)]
            )

        got = ours.generate(**inputs, max_new_tokens=10, logits_processor=ignoring(9))
        for row, length in enumerate((3, 9, 1, 6)):
            prompt = inputs["input_ids"][row : row + 1, 9 - length :]
            solo = llama.generate(prompt, max_new_tokens=10, logits_processor=ignoring(length))
            assert got[row, 9 - length :].tolist() == solo[0].tolist()
        assert got[:, 9:].tolist() != greedy_tokens(llama, steps=10, **inputs)

    def test_a_warper_in_a_greedy_call_changes_the_scores(self, llama, ours) -> None:
        kwargs = dict(max_new_tokens=3, return_dict_in_generate=True, output_scores=True)
        warped = LogitsProcessorList([TemperatureLogitsWarper(2.0), TopKLogitsWarper(5)])
        wanted = llama.generate(**padded(), **kwargs, logits_processor=warped)
        got = ours.generate(**padded(), **kwargs, logits_processor=warped)
        assert got.sequences.tolist() == wanted.sequences.tolist()
        for ours_now, theirs in zip(got.scores, wanted.scores, strict=True):
            torch.testing.assert_close(ours_now, theirs, rtol=0, atol=1e-4)

    def test_sampling_scores_are_those_of_transformers_order(self, ours) -> None:
        out = ours.generate(
            **padded(),
            max_new_tokens=5,
            do_sample=True,
            temperature=1.7,
            top_k=20,
            typical_p=0.8,
            repetition_penalty=1.2,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
        )
        chain = LogitsProcessorList(
            [
                transformers.RepetitionPenaltyLogitsProcessor(1.2),
                TemperatureLogitsWarper(1.7),
                TopKLogitsWarper(20),
                TypicalLogitsWarper(0.8),
            ]
        )
        for step, (scores, logits) in enumerate(zip(out.scores, out.logits, strict=True)):
            for row, length in enumerate((3, 9, 1, 6)):
                ids = out.sequences[row : row + 1, 9 - length : 9 + step]
                assert torch.equal(scores[row], chain(ids, logits[row : row + 1])[0])
                assert scores[row, out.sequences[row, 9 + step]] > -torch.inf


class TestStopping:
    def test_criteria_with_an_eos_token(self, llama, ours) -> None:
        inputs = padded()
        tokens = greedy_tokens(llama, **inputs)
        criteria = StoppingCriteriaList([StopOn(tokens[0][1], tokens[1][6])])
        both(llama, ours, **inputs, max_new_tokens=12, eos_token_id=tokens[2][3], stopping_criteria=criteria)

    def test_without_an_eos_token_rows_end_together(self, llama, ours) -> None:
        inputs = padded()
        tokens = greedy_tokens(llama, **inputs)
        for steps in ((1, 6, 3, 2), (0, 0, 0, 0), (2, 11, 4, 4)):
            stop = StopOn(*(row[step] for row, step in zip(tokens, steps, strict=True)))
            both(llama, ours, **inputs, max_new_tokens=12, stopping_criteria=StoppingCriteriaList([stop]))

    def test_a_row_that_is_never_stopped_takes_all_to_the_end(self, llama, ours) -> None:
        inputs = padded()
        tokens = greedy_tokens(llama, **inputs)
        only_first = next(t for t in tokens[0] if t not in tokens[1])
        criteria = StoppingCriteriaList([StopOn(only_first)])
        assert both(llama, ours, **inputs, max_new_tokens=12, stopping_criteria=criteria).shape == (4, 9 + 12)

    def test_max_length_criterion(self, llama, ours) -> None:
        criteria = StoppingCriteriaList([transformers.MaxLengthCriteria(12)])
        assert both(llama, ours, **padded(), max_new_tokens=20, stopping_criteria=criteria).shape == (4, 12)

    def test_max_time_stops_after_the_step_that_passes_it(self, llama, ours) -> None:
        assert both(llama, ours, **padded(), max_new_tokens=50, max_time=1e-9).shape == (4, 10)

    def test_stop_strings(self) -> None:
        model, tokenizer = tiny.make_model(), tiny.make_tokenizer()
        inputs = tokenizer(["alpha"], return_tensors="pt", return_token_type_ids=False)
        kwargs = dict(max_new_tokens=40, eos_token_id=None)
        tokens = [tokenizer.decode(token) for token in model.generate(**inputs, **kwargs)[0, 5:]]
        end = next(i for i in range(4, 40) if all(len(t) == 1 and t.isalnum() for t in tokens[i - 1 : i + 1]))
        stop = tokens[end - 1] + tokens[end]
        out = model.generate(**inputs, **kwargs, stop_strings=["never", stop], tokenizer=tokenizer)
        assert [tokenizer.decode(token) for token in out[0, 5:]] == tokens[: end + 1]

    def test_users_criteria_see_their_row_and_its_scores(self, ours) -> None:
        seen: dict[tuple[int, ...], Any] = {}

        class Spy(StoppingCriteria):
            def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
                assert input_ids.shape[0] == 1
                seen[tuple(input_ids[0].tolist())] = scores
                return torch.tensor([input_ids.shape[1] >= 7])

        kwargs = dict(max_new_tokens=9, eos_token_id=60, stopping_criteria=StoppingCriteriaList([Spy()]))
        out = ours.generate(
            **padded((3, 5)), **kwargs, return_dict_in_generate=True, output_scores=True, repetition_penalty=1.3
        )
        first = [tuple(out.sequences[0, 2 : 2 + n].tolist()) for n in range(4, 8)]
        assert all(ids in seen for ids in first)
        last = seen[first[-1]]
        assert len(last) == 4 and all(torch.equal(s[0], o[0]) for s, o in zip(last, out.scores[:4], strict=True))
        seen.clear()
        ours.generate(**padded((3, 5)), **kwargs)
        assert set(seen.values()) == {None}
