"""The model's forward: routing, loss, padding, saving."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from flexops import FlexHybridConfig, FlexHybridModel
from flexops.kernels import ATTENTION, SSM
from flexops.models.layout import layout_routes, layout_strip, resolve_layout

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "initializer_range": 0.2,
}


def make_model(seed: int = 0, **changes: object) -> FlexHybridModel:
    torch.manual_seed(seed)
    return FlexHybridModel(FlexHybridConfig(**{**SMALL, **changes})).eval()


def random_ids(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, SMALL["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


def test_hard_routing_equals_the_layout_forced():
    model, ids = make_model(), random_ids(6, 19)
    with torch.no_grad():
        adaptive = model(ids)
        layouts = [["attention" if r == ATTENTION else "ssm" for r in row] for row in adaptive.layouts.tolist()]
        forced = model(ids, layout=layouts)
    assert len({tuple(row) for row in layouts}) > 1, "the test wants requests that choose differently"
    torch.testing.assert_close(forced.logits, adaptive.logits)
    assert torch.equal(forced.layouts, adaptive.layouts)
    assert set(forced.gate_probs.unique().tolist()) == {0.0, 1.0}


def test_soft_routing_is_the_weighted_sum_of_both_branches():
    model, ids = make_model(num_hidden_layers=1), random_ids(3, 11)
    layer = model.layers[0]
    with torch.no_grad():
        out = model(ids, routing="soft")
        h = model.embed_tokens(ids)
        u = layer.input_norm(h.flatten(0, 1))
        cu = torch.arange(0, 34, 11, dtype=torch.int32)
        positions = torch.arange(11, dtype=torch.int32).repeat(3)
        from flexops.models.mixers import rope_table

        attention = layer.attention(u, cu, positions, rope_table(model.config, 11, "cpu")).view(3, 11, -1)
        ssm = layer.ssm(u, cu).view(3, 11, -1)
        p = out.gate_probs[:, 0]
        h = h + p[:, 0, None, None] * attention + p[:, 1, None, None] * ssm
        h = h + layer.ffn(layer.ffn_norm(h.flatten(0, 1))).view_as(h)
        expected = model.lm_head(model.norm(h.flatten(0, 1))).view(3, 11, -1)
    torch.testing.assert_close(out.logits, expected)
    assert p.min() > 0.01 and p.max() < 0.99


def test_straight_through_is_hard_forward_and_soft_backward():
    model, ids = make_model(), random_ids(4, 13)
    with torch.no_grad():
        hard = model(ids, routing="hard").logits
    labels = ids.clone()
    labels[:, :6] = -100
    out = model(ids, labels=labels, routing="straight_through")
    with torch.no_grad():
        hard = model(ids, labels=labels, routing="hard")
    torch.testing.assert_close(out.logits, hard.logits)
    out.loss.backward()
    assert all(layer.gate.w1.grad.abs().sum() > 0 for layer in model.layers)


def test_gradients_of_soft_routing_match_finite_differences():
    model = make_model(num_hidden_layers=2).double()
    ids = random_ids(2, 9)
    labels = ids.clone()
    labels[:, :4] = -100

    def loss() -> torch.Tensor:
        return model(ids, labels=labels, routing="soft", route_cost_weight=0.3).loss

    loss().backward()
    layer = model.layers[1]
    parameters = {
        "gate.w1": layer.gate.w1,
        "gate.w2": layer.gate.w2,
        "gate.b1": layer.gate.b1,
        "attention.q_proj": layer.attention.q_proj.weight,
        "ssm.A_log": layer.ssm.A_log,
        "ssm.dt_bias": layer.ssm.dt_bias,
        "ssm.D": layer.ssm.D,
        "ssm.conv1d": layer.ssm.conv1d.weight,
        "ssm.in_proj": layer.ssm.in_proj.weight,
        "ssm.norm": layer.ssm.norm.weight,
        "layer 0 gate.b2": model.layers[0].gate.b2,
        "embedding": model.embed_tokens.weight,
    }
    for name, parameter in parameters.items():
        flat, gradient = parameter.data.view(-1), parameter.grad.view(-1)
        i = int(gradient.abs().argmax())
        before, step = flat[i].item(), 1e-6
        with torch.no_grad():
            flat[i] = before + step
            high = loss().item()
            flat[i] = before - step
            low = loss().item()
            flat[i] = before
        numeric = (high - low) / (2 * step)
        assert numeric == pytest.approx(gradient[i].item(), rel=2e-3), name


def test_loss_is_cross_entropy_behind_the_prompt_plus_the_cost():
    model, ids = make_model(), random_ids(2, 12)
    labels = ids.clone()
    labels[0, :5] = -100
    labels[1, :7] = -100
    out = model(ids, labels=labels, route_cost_weight=0.5)
    picked = torch.cat([out.logits[0, 4:-1], out.logits[1, 6:-1]])
    expected = torch.nn.functional.cross_entropy(picked, torch.cat([ids[0, 5:], ids[1, 7:]]))
    torch.testing.assert_close(out.lm_loss, expected)
    cost = (out.gate_probs * torch.tensor([model.config.attention_cost, model.config.ssm_cost])).sum(-1).mean()
    torch.testing.assert_close(out.loss, expected + 0.5 * cost)
    # labels inside a prompt that is given explicitly are not trained on: the gate has seen those tokens
    longer = model(ids, labels=ids, prompt_lengths=torch.tensor([5, 7]))
    torch.testing.assert_close(longer.lm_loss, expected)


def test_tokens_and_labels_behind_the_prompt_do_not_reach_the_gate():
    model, ids = make_model(), random_ids(3, 16)
    labels = ids.clone()
    labels[:, :6] = -100
    changed = ids.clone()
    changed[:, 6:] = (changed[:, 6:] + 11) % 97
    changed_labels = labels.clone()
    changed_labels[:, 6:] = changed[:, 6:]
    with torch.no_grad():
        first, second = model(ids, labels=labels), model(changed, labels=changed_labels)
        alone = model(ids[:, :6])
    assert torch.equal(first.gate_probs, second.gate_probs)
    assert torch.equal(first.layouts, second.layouts)
    torch.testing.assert_close(first.gate_probs, alone.gate_probs)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side):
    model = make_model()
    rows = [random_ids(1, n, seed=n)[0] for n in (1, 7, 20)]
    width = 20
    ids, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.long)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[i, where], mask[i, where] = row, 1
    with torch.no_grad():
        out = model(ids, attention_mask=mask)
        other_pad = model(torch.where(mask.bool(), ids, 42), attention_mask=mask)
        assert torch.equal(out.logits, other_pad.logits)
        for i, row in enumerate(rows):
            solo = model(row[None])
            torch.testing.assert_close(out.logits[i][mask[i].bool()], solo.logits[0])
            assert torch.equal(out.layouts[i], solo.layouts[0])
            assert (out.logits[i][~mask[i].bool()] == 0).all()


def test_saving_and_loading_keeps_every_bit(tmp_path):
    model = make_model(tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, FlexHybridModel)
    for (name, mine), (_, theirs) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "flex_hybrid"
    (tmp_path / "config.json").write_text(json.dumps({**config, "somebody_elses_key": [1, 2]}))
    assert AutoConfig.from_pretrained(tmp_path).somebody_elses_key == [1, 2]


def test_tied_head_is_one_parameter(tmp_path):
    model = make_model(tie_word_embeddings=True)
    assert model.lm_head.weight is model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    loaded = FlexHybridModel.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_fifty_steps_of_training_lower_the_loss():
    model = make_model(initializer_range=0.02).train()
    ids = random_ids(8, 24)
    labels = ids.clone()
    labels[:, :6] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(50):
        out = model(ids, labels=labels, route_cost_weight=0.05)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.lm_loss.item())
    assert losses[0] == pytest.approx(torch.tensor(97.0).log().item(), rel=0.1)
    assert losses[-1] < 0.5 * losses[0]


def test_layouts_resolve_and_refuse():
    config = FlexHybridConfig(**{**SMALL, "layer_routes": ["adaptive", "attention", "ssm", "adaptive"]})
    assert layout_routes(None, config) == [-1, ATTENTION, SSM, -1]
    assert layout_routes("ssm", config) == [SSM, ATTENTION, SSM, SSM]
    assert layout_routes(["attention", "attention", "ssm", "adaptive"], config) == [ATTENTION, ATTENTION, SSM, -1]
    assert layout_strip([ATTENTION, SSM, -1]) == "AS?"
    assert resolve_layout(None, config, 3) is None
    assert resolve_layout([None, "ssm"], config, 2).tolist() == [[-1, 0, 1, -1], [1, 0, 1, 1]]
    for bad in ("mamba", ["attention"], ["attention", "ssm", "ssm", "ssm"], ["x"] * 4):
        with pytest.raises(ValueError, match="layout"):
            layout_routes(bad, config)
    with pytest.raises(ValueError, match="2 entries for 3 requests"):
        resolve_layout([None, "ssm"], config, 3)


def test_bad_inputs_are_refused_with_the_remedy():
    model, ids = make_model(), random_ids(2, 5)
    cases = [
        ({"input_ids": ids[0]}, "batch, tokens"),
        ({"input_ids": ids, "attention_mask": torch.ones(2, 4)}, "attention_mask has shape"),
        ({"input_ids": ids, "labels": ids[:, :3]}, "labels has shape"),
        ({"input_ids": ids, "attention_mask": torch.tensor([[1] * 5, [0] * 5])}, "row 1 .* has no token"),
        ({"input_ids": ids + 97}, r"must lie in \[0, 97\)"),
        ({"input_ids": ids, "routing": "medium"}, "routing="),
        ({"input_ids": ids, "layout": "mamba"}, "layout="),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            model(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_routes": ["adaptive"]}, "layer_routes"),
        ({"num_key_value_heads": 3}, "num_attention_heads / num_key_value_heads"),
        ({"head_dim": 12}, "head_dim / 8"),
        ({"mamba_d_conv": 5}, "mamba_d_conv=5"),
        ({"mamba_chunk_size": 24}, "mamba_chunk_size=24"),
        ({"mamba_n_groups": 3}, "mamba_n_heads / mamba_n_groups"),
    ],
)
def test_bad_configs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        FlexHybridConfig(**{**SMALL, **changes})
