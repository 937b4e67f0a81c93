"""What is `generate`'s own: rows that do not depend on each other, layouts, seeds, an engine that follows the model."""

import copy
import pickle
import threading

import pytest
import torch
from transformers import LlamaForCausalLM

from flexops import EngineConfig, FlexHybridModel
from flexops import kernels as fk
from flexops.generation import FlexGenerateOutput, engine_for
from flexops.models.loading import from_model
from tests import tiny
from tests.generation_cases import SMALL, greedy_tokens, make_llama, padded


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


@pytest.fixture(scope="module")
def adaptive() -> FlexHybridModel:
    model = tiny.make_model()
    engine_for(model, EngineConfig(memory_bytes=1 << 23, check_integrity=True))
    return model


@pytest.fixture(scope="module", params=["adaptive", "mixed", "no_ffn", "bf16"])
def model(request: pytest.FixtureRequest) -> FlexHybridModel:
    sizes = {"mixed": dict(layer_routes=["attention", "adaptive", "ssm"]), "no_ffn": dict(intermediate_size=0)}
    model = tiny.make_model(**sizes.get(request.param, {}))
    if request.param == "bf16":
        model = model.to(torch.bfloat16)
    engine_for(model, EngineConfig(memory_bytes=1 << 23, check_integrity=True))
    return model


class TestSampling:
    KWARGS = dict(max_new_tokens=8, do_sample=True, top_k=0)

    def test_torch_manual_seed_repeats_a_call(self, ours) -> None:
        def run(seed: int) -> list[list[int]]:
            torch.manual_seed(seed)
            return ours.generate(**padded(), **self.KWARGS).tolist()

        assert run(1) == run(1) != run(2)

    def test_further_calls_go_on_with_other_numbers(self, ours) -> None:
        torch.manual_seed(1)
        assert ours.generate(**padded(), **self.KWARGS).tolist() != ours.generate(**padded(), **self.KWARGS).tolist()

    def test_greedy_leaves_torchs_generator_alone(self, ours) -> None:
        torch.manual_seed(1)
        before = torch.get_rng_state()
        ours.generate(**padded(), max_new_tokens=3)
        assert torch.equal(torch.get_rng_state(), before)

    def test_top_k_1_is_greedy(self, llama, ours) -> None:
        inputs = padded()
        out = ours.generate(**inputs, max_new_tokens=12, do_sample=True, top_k=1)
        assert out[:, 9:].tolist() == greedy_tokens(llama, **inputs)

    def test_a_row_gives_the_tokens_of_its_solo_run(self, ours) -> None:
        inputs = padded()
        torch.manual_seed(5)
        batch = ours.generate(**inputs, **self.KWARGS)
        for row, length in enumerate((3, 9, 1, 6)):
            torch.manual_seed(5)
            torch.randint(2**63 - 1, (row,))  # the seeds of the rows before
            solo = ours.generate(inputs["input_ids"][row : row + 1, 9 - length :], **self.KWARGS)
            assert solo[0].tolist() == batch[row, 9 - length :].tolist()


class TestRows:
    """A row is what it would be alone, bit for bit, on adaptive models and fixed ones."""

    LENGTHS = (1, 7, 64)

    @staticmethod
    def run(model: FlexHybridModel, **inputs: torch.Tensor) -> FlexGenerateOutput:
        return model.generate(
            **inputs,
            max_new_tokens=6,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
        )

    def test_batched_equals_solo(self, model) -> None:
        inputs = padded(self.LENGTHS)
        batch = self.run(model, **inputs)
        for row, length in enumerate(self.LENGTHS):
            solo = self.run(model, input_ids=inputs["input_ids"][row : row + 1, 64 - length :])
            assert batch.sequences[row, 64 - length :].tolist() == solo.sequences[0].tolist()
            for name in ("scores", "logits"):
                for together, alone in zip(getattr(batch, name), getattr(solo, name), strict=True):
                    assert torch.equal(together[row], alone[0])
            assert torch.equal(batch.layouts[row], solo.layouts[0])
            assert torch.equal(batch.gate_margins[row], solo.gate_margins[0])

    def test_the_pad_token_changes_nothing(self, model) -> None:
        first = self.run(model, **padded(self.LENGTHS, pad=1))
        for pad in (0, 40, -100, 10**6):
            other = self.run(model, **padded(self.LENGTHS, pad=pad))
            assert torch.equal(first.sequences[:, 64:], other.sequences[:, 64:])
            assert all(torch.equal(a, b) for a, b in zip(first.logits, other.logits, strict=True))

    def test_where_the_pads_stand_changes_nothing(self, model) -> None:
        ids = torch.arange(10, 17)
        plain = self.run(model, input_ids=ids[None])
        for places in ([5, 6, 7, 8, 9, 10, 11], [0, 1, 2, 3, 4, 5, 6], [0, 2, 3, 5, 8, 9, 11]):
            row, mask = torch.zeros(1, 12, dtype=torch.int64), torch.zeros(1, 12, dtype=torch.int64)
            row[0, places], mask[0, places] = ids, 1
            out = self.run(model, input_ids=row, attention_mask=mask)
            assert torch.equal(out.sequences[:, 12:], plain.sequences[:, 7:])
            assert all(torch.equal(a, b) for a, b in zip(out.logits, plain.logits, strict=True))


class TestLayouts:
    def test_gates_choose_as_in_forward(self, adaptive) -> None:
        inputs = padded((3, 40, 1, 17, 8, 60))
        adaptive.generate(**inputs, max_new_tokens=3)
        with torch.no_grad():
            wanted = adaptive(**inputs).layouts
        assert adaptive.last_layouts.dtype == torch.int32
        assert adaptive.last_layouts.tolist() == wanted.tolist()
        assert 0 < wanted.float().mean() < 1

    def test_one_for_all(self, adaptive) -> None:
        for layout, code in (("attention", 0), ("ssm", 1)):
            out = adaptive.generate(**padded(), max_new_tokens=2, layout=layout, return_dict_in_generate=True)
            assert out.layouts.tolist() == [[code] * 3] * 4 == adaptive.last_layouts.tolist()
            assert out.gate_margins.tolist() == [[1.0] * 3] * 4

    def test_a_list_of_routes(self, adaptive) -> None:
        adaptive.generate(**padded(), max_new_tokens=2, layout=["ssm", "attention", "ssm"])
        assert adaptive.last_layouts.tolist() == [[1, 0, 1]] * 4

    def test_one_per_prompt(self, adaptive) -> None:
        layouts = ["attention", None, ["ssm", "adaptive", "attention"], "ssm"]
        free = adaptive.generate(**padded(), max_new_tokens=2, return_dict_in_generate=True).layouts
        for repeats in (1, 2):
            adaptive.generate(
                **padded(), max_new_tokens=2, layout=layouts, do_sample=repeats > 1, num_return_sequences=repeats
            )
            got = adaptive.last_layouts[::repeats].tolist()
            assert got[0] == [0, 0, 0] and got[1] == free[1].tolist() and got[3] == [1, 1, 1]
            assert got[2][0] == 1 and got[2][2] == 0
            assert adaptive.last_layouts.tolist() == [row for row in got for _ in range(repeats)]

    @pytest.mark.parametrize("as_tensor", [False, True], ids=["list", "tensor"])
    def test_gate_bias(self, adaptive, as_tensor) -> None:
        adaptive.generate(**padded(), max_new_tokens=2, gate_bias=100.0)
        assert adaptive.last_layouts.tolist() == [[0] * 3] * 4
        bias = [100.0, -100.0, 100.0, -100.0]
        adaptive.generate(
            **padded(),
            max_new_tokens=2,
            gate_bias=torch.tensor(bias) if as_tensor else bias,
            do_sample=True,
            num_return_sequences=2,
        )
        assert adaptive.last_layouts.tolist() == [[int(b < 0)] * 3 for b in bias for _ in range(2)]

    def test_forced_layouts_give_other_tokens(self, adaptive) -> None:
        attention = adaptive.generate(**padded(), max_new_tokens=8, layout="attention")
        assert attention.tolist() != adaptive.generate(**padded(), max_new_tokens=8, layout="ssm").tolist()


class TestEngine:
    """Kept from call to call, and made anew when it would be out of date."""

    @staticmethod
    def tokens(model: FlexHybridModel) -> list[list[int]]:
        return model.generate(**padded(), max_new_tokens=6).tolist()

    def test_is_kept(self) -> None:
        model = tiny.make_model()
        engine = engine_for(model)
        self.tokens(model)
        assert engine_for(model) is engine and engine.stats()["requests_added"] == 4

    @pytest.mark.parametrize(
        "change",
        [
            lambda p: p.mul_(-1.5),
            lambda p: p.data.mul_(-1.5),
            lambda p: p.data.copy_(p.data.flip(0)),
            lambda p: setattr(p, "data", p.data * -1.5),
        ],
        ids=["in_place", "through_data", "reordered_through_data", "replaced"],
    )
    @pytest.mark.parametrize(
        "name", ["embed_tokens.weight", "layers.1.attention.q_proj.weight", "layers.2.ffn_norm.weight"]
    )
    @torch.no_grad()
    def test_changed_weights_are_seen(self, name, change) -> None:
        model = tiny.make_model()
        model.get_parameter("layers.2.ffn_norm.weight").uniform_(0.2, 2.0)
        before = self.tokens(model)
        change(model.get_parameter(name))
        fresh = tiny.make_model(seed=1)
        fresh.load_state_dict(model.state_dict())
        assert self.tokens(model) == self.tokens(fresh) != before

    @torch.no_grad()
    def test_one_changed_bit_is_seen(self) -> None:
        model = tiny.make_model()
        engine = engine_for(model)
        weight = model.layers[0].ffn.up_proj.weight.data
        weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(9.0))
        assert engine_for(model) is not engine

    @pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
    def test_a_training_step_is_seen(self, fused) -> None:
        model = tiny.make_model()
        before = self.tokens(model)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=fused)
        model(**padded(), labels=padded()["input_ids"]).loss.backward()
        optimizer.step()
        after = self.tokens(model)
        fresh = tiny.make_model(seed=1)
        fresh.load_state_dict(model.state_dict())
        assert after == self.tokens(fresh) != before
        assert model.training

    def test_another_dtype(self) -> None:
        model = tiny.make_model()
        self.tokens(model)
        model.to(torch.bfloat16)
        out = model.generate(**padded(), max_new_tokens=2, return_dict_in_generate=True, output_logits=True)
        fresh = tiny.make_model(seed=1).to(torch.bfloat16)
        fresh.load_state_dict(model.state_dict())
        wanted = fresh.generate(**padded(), max_new_tokens=2, return_dict_in_generate=True, output_logits=True)
        assert all(torch.equal(a, b) for a, b in zip(out.logits, wanted.logits, strict=True))

    def test_training_mode_changes_nothing(self) -> None:
        model = tiny.make_model()
        wanted = self.tokens(model)
        assert self.tokens(model.train()) == wanted
        assert model.training and all(p.grad is None and p.requires_grad for p in model.parameters())

    @pytest.mark.parametrize("first, then", [(True, False), (False, True)], ids=["from_inference", "into_inference"])
    def test_inference_mode(self, first, then) -> None:
        model = tiny.make_model()
        with fk.backend("reference"):  # whose writes torch watches
            with torch.inference_mode(first):
                before = self.tokens(model)
            with torch.inference_mode(then):
                assert self.tokens(model) == before

    @pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
    def test_copies_have_their_own(self, again) -> None:
        model = tiny.make_model()
        wanted = self.tokens(model)
        twin = again(model)
        assert self.tokens(twin) == wanted
        assert engine_for(twin) is not engine_for(model)

    def test_settings_outlive_the_engine(self) -> None:
        model = tiny.make_model()
        engine = engine_for(model, SMALL)
        with torch.no_grad():
            model.norm.weight.mul_(2)
        assert engine_for(model) is not engine
        assert engine_for(model).config == SMALL

    def test_a_layer_that_the_engine_does_not_know_is_refused(self) -> None:
        class Adapter(torch.nn.Linear):
            pass

        model = tiny.make_model()
        self.tokens(model)
        model.layers[1].ffn.up_proj = Adapter(32, 48, bias=False)
        with pytest.raises(ValueError, match=r"Adapter at 'layers\.1\.ffn\.up_proj'.*merge"):
            self.tokens(model)

    def test_threads_take_turns(self) -> None:
        model = tiny.make_model()
        wanted = self.tokens(model)
        got: list[list[list[int]]] = []

        def work() -> None:
            with fk.backend("cpu"):
                got.extend(self.tokens(model) for _ in range(3))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == [wanted] * 12

    def test_more_rows_than_the_engine_runs_at_once(self) -> None:
        model = tiny.make_model()
        inputs = padded(tuple(range(1, 30)))
        wanted = model.generate(**inputs, max_new_tokens=5)
        engine_for(model, EngineConfig(memory_bytes=1 << 19, max_num_requests=4, check_integrity=True))
        assert model.generate(**inputs, max_new_tokens=5).tolist() == wanted.tolist()
