"""`generate` keeps transformers' contract: the same calls on the same weights give what transformers gives."""

import contextlib
import io

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM, LogitsProcessorList, StoppingCriteriaList, TextStreamer
from transformers.generation.streamers import BaseStreamer

from flexops import FlexHybridModel
from flexops import kernels as fk
from flexops.generation import FlexGenerateOutput, engine_for
from flexops.models.loading import from_model
from tests import tiny
from tests.generation_cases import PAD, SMALL, Recorder, Shift, StopOn, both, greedy_tokens, make_llama, padded


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


class TestGreedy:
    """Tokens, shapes and padding equal those of transformers."""

    @pytest.mark.parametrize("lengths", [(5,), (4, 4), (3, 9, 1, 6)], ids=["one", "equal", "ragged"])
    def test_max_new_tokens(self, llama, ours, lengths) -> None:
        assert both(llama, ours, **padded(lengths), max_new_tokens=10).shape == (len(lengths), max(lengths) + 10)

    def test_without_mask(self, llama, ours) -> None:
        both(llama, ours, input_ids=padded((4, 4))["input_ids"], max_new_tokens=5)

    def test_mask_inferred_from_the_pad_token(self, llama, ours) -> None:
        both(llama, ours, input_ids=padded()["input_ids"], max_new_tokens=5)

    def test_inputs_by_position(self, ours) -> None:
        ids = padded((4, 4))["input_ids"]
        assert torch.equal(ours.generate(ids, max_new_tokens=3), ours.generate(input_ids=ids, max_new_tokens=3))

    def test_one_row_with_pads(self, llama, ours) -> None:
        both(llama, ours, **{name: t[:1] for name, t in padded().items()}, max_new_tokens=5)

    def test_default_length(self, llama, ours) -> None:
        assert both(llama, ours, **padded()).shape[1] <= 9 + 20

    def test_max_length_counts_padding(self, llama, ours) -> None:
        assert both(llama, ours, **padded(), max_length=14).shape == (4, 14)

    def test_generation_config(self, llama, ours) -> None:
        both(llama, ours, **padded(), generation_config=GenerationConfig(max_new_tokens=4, pad_token_id=PAD))

    def test_from_bos_alone(self, llama, ours) -> None:
        assert both(llama, ours, bos_token_id=7, max_new_tokens=4).shape == (1, 5)

    def test_use_cache_false(self, llama, ours) -> None:
        both(llama, ours, **padded(), max_new_tokens=4, use_cache=False)

    def test_a_whole_context(self, llama, ours) -> None:
        assert both(llama, ours, **padded((3, 9)), max_length=128).shape == (2, 128)


class TestEndOfText:
    def test_staggered_eos(self, llama, ours) -> None:
        inputs = padded()
        tokens = greedy_tokens(llama, **inputs)
        for eos in {row[step] for row, step in zip(tokens, (2, 5, 7, 9), strict=True)}:
            out = both(llama, ours, **inputs, max_new_tokens=12, eos_token_id=eos)
            for row, free in zip(out[:, 9:].tolist(), tokens, strict=True):
                end = free.index(eos) + 1 if eos in free else len(free)
                assert row[:end] == free[:end]
                assert set(row[end:]) <= {PAD}

    def test_eos_list(self, llama, ours) -> None:
        inputs = padded()
        tokens = greedy_tokens(llama, **inputs)
        eos = [tokens[0][2], tokens[1][4], tokens[3][6]]
        assert both(llama, ours, **inputs, max_new_tokens=12, eos_token_id=eos).shape[1] <= 9 + 12

    def test_all_rows_end_at_once(self, llama, ours) -> None:
        inputs = padded((4,))
        eos = greedy_tokens(llama, **inputs)[0][0]
        assert both(llama, ours, **inputs, max_new_tokens=12, eos_token_id=eos).shape == (1, 5)

    def test_the_pad_token_fills_up(self, llama, ours) -> None:
        inputs = padded()
        eos = greedy_tokens(llama, **inputs)[1][1]
        for pad in (0, 33, eos):
            both(llama, ours, **inputs, max_new_tokens=12, eos_token_id=eos, pad_token_id=pad)

    @pytest.mark.parametrize(
        "minimum", [{"min_new_tokens": 4}, {"min_length": 12}], ids=["min_new_tokens", "min_length"]
    )
    def test_not_before_the_minimum(self, llama, ours, minimum) -> None:
        inputs = padded()
        eos = greedy_tokens(llama, **inputs)[1][1]
        out = both(llama, ours, **inputs, max_new_tokens=12, eos_token_id=eos, **minimum)
        assert eos not in out[:, 9:12].tolist()


class TestStreamers:
    @pytest.mark.parametrize("lengths", [(5,), (3, 9, 1, 6)], ids=["one", "ragged"])
    def test_calls(self, llama, ours, lengths) -> None:
        inputs = padded(lengths)
        eos = greedy_tokens(llama, **inputs)[0][3]
        for kwargs in (dict(max_new_tokens=8), dict(max_new_tokens=8, eos_token_id=eos)):
            wanted, got = Recorder(), Recorder()
            llama.generate(**inputs, **kwargs, streamer=wanted)
            ours.generate(**inputs, **kwargs, streamer=got)
            assert got.calls == wanted.calls
            assert got.calls[0] == inputs["input_ids"].tolist() and got.calls[-1] == "end"

    def test_calls_where_rows_end_together(self, llama, ours) -> None:
        inputs = padded()
        stop = StopOn(*(row[step] for row, step in zip(greedy_tokens(llama, **inputs), (1, 6, 3, 2), strict=True)))
        wanted, got = Recorder(), Recorder()
        for model, streamer in ((llama, wanted), (ours, got)):
            model.generate(
                **inputs, max_new_tokens=12, stopping_criteria=StoppingCriteriaList([stop]), streamer=streamer
            )
        assert got.calls == wanted.calls

    def test_tokens_come_while_the_rest_is_computed(self, ours) -> None:
        engine, steps = engine_for(ours), []

        class Clock(BaseStreamer):
            def put(self, value: torch.Tensor) -> None:
                steps.append(engine.stats()["generated_tokens"])

            def end(self) -> None:
                steps.append(engine.stats()["generated_tokens"])

        start = engine.stats()["generated_tokens"]
        ours.generate(**padded((4,)), max_new_tokens=4, streamer=Clock())
        assert [n - start for n in steps] == [0, 1, 2, 3, 4, 4]

    def test_text_streamer(self) -> None:
        model, tokenizer = tiny.make_model(), tiny.make_tokenizer()
        inputs = tokenizer(["one two"], return_tensors="pt", return_token_type_ids=False)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            out = model.generate(**inputs, max_new_tokens=6, streamer=TextStreamer(tokenizer, skip_prompt=True))
        assert printed.getvalue() == tokenizer.decode(out[0, 7:]) + "\n"


class TestOutputs:
    def test_dict(self, llama, ours) -> None:
        inputs, bias = padded(), {(7,): 2.5}
        eos = greedy_tokens(llama, **inputs, sequence_bias=bias)[1][2]
        kwargs = dict(
            max_new_tokens=8,
            eos_token_id=eos,
            sequence_bias=bias,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
        )
        wanted, got = llama.generate(**inputs, **kwargs), ours.generate(**inputs, **kwargs)
        assert isinstance(got, FlexGenerateOutput) and isinstance(got, type(wanted))
        assert got.sequences.tolist() == wanted.sequences.tolist()
        assert len(got.scores) == len(wanted.scores) == len(got.logits)
        ended = torch.zeros(4, dtype=torch.bool)
        for step in range(len(got.scores)):
            for name in ("scores", "logits"):
                ours_now, theirs = getattr(got, name)[step], getattr(wanted, name)[step]
                assert ours_now.shape == theirs.shape and ours_now.dtype == theirs.dtype == torch.float32
                torch.testing.assert_close(ours_now[~ended], theirs[~ended], rtol=0, atol=1e-4)
                assert (ours_now[ended].argmax(1) == PAD).all() and (ours_now[ended].softmax(1).amax(1) == 1).all()
            ended |= got.sequences[:, 9 + step] == eos
        assert ended.any()

    def test_transition_scores_of_ended_rows_are_certain(self, llama, ours) -> None:
        inputs = padded()
        eos = greedy_tokens(llama, **inputs)[1][2]
        out = ours.generate(
            **inputs, max_new_tokens=8, eos_token_id=eos, return_dict_in_generate=True, output_scores=True
        )
        scores = ours.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
        new_tokens = out.sequences[:, 9:]
        behind = (new_tokens == eos).cumsum(1) - (new_tokens == eos).int() > 0
        assert behind.any() and (scores[behind] == 0).all() and (scores[~behind] < 0).all()

    def test_nothing_beside_the_sequences_unless_asked(self, ours) -> None:
        out = ours.generate(**padded(), max_new_tokens=2, return_dict_in_generate=True)
        assert out.scores is None and out.logits is None and out.layouts.shape == (4, 2)

    def test_scores_without_a_dict_are_ignored(self, llama, ours) -> None:
        both(llama, ours, **padded(), max_new_tokens=2, output_scores=True)

    def test_num_return_sequences(self, ours) -> None:
        torch.manual_seed(3)
        out = ours.generate(**padded(), max_new_tokens=6, do_sample=True, temperature=4.0, num_return_sequences=3)
        assert out.shape == (12, 15)
        assert torch.equal(out[:, :9], padded()["input_ids"].repeat_interleave(3, 0))
        assert len({tuple(row) for row in out.tolist()}) == 12

    def test_num_return_sequences_with_a_processor_of_the_users(self, ours) -> None:
        shift = LogitsProcessorList([Shift()])
        out = ours.generate(
            **padded(), max_new_tokens=4, do_sample=True, num_return_sequences=2, logits_processor=shift
        )
        assert out.shape == (8, 13) and len({tuple(row) for row in out.tolist()}) == 8

    def test_prefix_function_knows_the_prompt_of_each_sample(self, ours) -> None:
        def allowed(prompt: int, ids: torch.Tensor) -> list[int]:
            return [10 * (prompt + 1), 10 * (prompt + 1) + 1]

        out = ours.generate(
            **padded(), max_new_tokens=3, do_sample=True, num_return_sequences=2, prefix_allowed_tokens_fn=allowed
        )
        assert (out[:, 9:] // 10).tolist() == [[i // 2 + 1] * 3 for i in range(8)]
