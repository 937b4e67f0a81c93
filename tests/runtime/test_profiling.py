"""Terms, fit and storage of branch profiles, on times that are made up and so known."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from flexops import FlexHybridConfig
from flexops.kernels import ATTENTION, SSM
from flexops.runtime import profiling
from flexops.runtime.measuring import draw_loads
from flexops.runtime.profiling import FFN, BranchLoad, BranchProfile, HeldOut, Sample, find_profile, fit, terms

CONFIG = FlexHybridConfig(
    hidden_size=512, num_attention_heads=8, num_key_value_heads=2, head_dim=64, mamba_n_heads=16, mamba_d_state=128
)
LOADS = draw_loads(120, 16, 512, 2000, np.random.default_rng(3))
CPU = torch.device("cpu")


def test_what_a_load_counts():
    load = BranchLoad.of(decodes=[0, 9, 99], prefills=[(4, 0), (3, 10)])
    assert load.counts.tolist() == [1, 1, 1, 4, 3] and load.starts.tolist() == [0, 9, 99, 0, 10]
    assert (load.num_decodes, load.tokens, load.prefill_tokens) == (3, 10, 7)
    assert load.decode_keys == 1 + 10 + 100
    assert load.prefill_keys == 4 + 13
    assert load.prefill_pairs == (1 + 2 + 3 + 4) + (11 + 12 + 13)
    empty = BranchLoad.of()
    assert (empty.tokens, empty.decode_keys, empty.prefill_pairs) == (0, 0, 0.0)


def test_terms_of_table_1():
    load = BranchLoad.of(decodes=[9, 99], prefills=[(38, 0)])

    def shared(weights: int) -> list[float]:
        return [1, 0, *(weights / 1e6 * n for n in (2, 6, 24, 8, 0, 0))]

    pairs, heads, state = 38 * 39 / 2, 8 * 64 / 1e6, 1024 * 128 / 1e6
    expected = [*shared(512 * 64 * 20), 1, 1, 1, 2, pairs * heads, 38 * heads, 110 * heads]
    assert terms(ATTENTION, load, CONFIG) == pytest.approx(expected)
    expected = [*shared(512 * (2 * 1024 + 1280 + 16)), 1, 1, 1, 38 * state, 2 * state]
    assert terms(SSM, load, CONFIG) == pytest.approx(expected)
    assert terms(FFN, load, CONFIG) == pytest.approx(shared(3 * 512 * 1536))
    one, prompt = BranchLoad.of(decodes=[5]), BranchLoad.of(prefills=[(5, 0)])
    assert [terms(SSM, load, CONFIG)[[1, 8, 9]].tolist() for load in (one, prompt)] == [[1, 1, 0], [0, 0, 1]]
    assert [terms(FFN, load, CONFIG)[1] for load in (one, prompt)] == [1, 0]


def test_non_negative_least_squares_by_hand():
    solve = profiling.non_negative_least_squares
    assert solve(np.array([[1.0, 0], [0, 1]]), np.array([3.0, -2])) == pytest.approx([3, 0])
    # without the bound x = (-1, 2): with it the second column alone, (1*1 + 2*3) / (1 + 4)
    assert solve(np.array([[1.0, 1], [1, 2]]), np.array([1.0, 3])) == pytest.approx([0, 7 / 5])
    assert solve(np.array([[0.0, 2], [0, 2]]), np.array([4.0, 8])) == pytest.approx([0, 3])


@pytest.mark.parametrize("seed", range(5))
def test_non_negative_least_squares_meets_its_conditions(seed):
    """Karush-Kuhn-Tucker: no gradient where x > 0, none that would gain where x = 0."""
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(40, 12)) * 10.0 ** rng.uniform(-3, 3, 12), rng.normal(size=40)
    x = profiling.non_negative_least_squares(a, b)
    gradient = a.T @ (b - a @ x) / np.linalg.norm(a, axis=0)
    assert (x >= 0).all() and 0 < (x > 0).sum() < 12
    assert np.abs(gradient[x > 0]).max() < 1e-9 and gradient[x == 0].max() < 1e-9


def made_up(part: int, noise: float = 0.0, seed: int = 0) -> tuple[list[Sample], np.ndarray]:
    """Samples of a part whose terms cost what they cost, with relative noise, and these costs."""
    rng = np.random.default_rng(seed)
    size = len(terms(part, LOADS[0], CONFIG))
    true = rng.uniform(0.5, 2.0, size) * [30, 9, *[5] * 6, 10, 12, 3, *[40] * 4][:size]
    times = [terms(part, load, CONFIG) @ true * np.exp(noise * rng.normal()) for load in LOADS]
    return [Sample(part, load, float(us), noise, float(us), noise) for load, us in zip(LOADS, times, strict=True)], true


@pytest.mark.parametrize("part", [ATTENTION, SSM, FFN])
def test_a_fit_without_noise_is_exact(part):
    samples, true = made_up(part)
    profile = fit(samples, CONFIG, {"model": 1})
    name = profiling.PART_NAMES[part]
    assert list(profile.coefficients) == [name] and min(profile.coefficients[name]) >= 0
    held_out = profile.held_out[name]
    assert held_out.p90 < 1e-6 and held_out.count == 30 and held_out.spread == 0.0
    new = BranchLoad.of(decodes=[7, 300], prefills=[(100, 50)])
    assert profile.predict_us(part, new, CONFIG) == pytest.approx(terms(part, new, CONFIG) @ true, rel=1e-5)


def test_errors_are_of_samples_that_the_fit_has_not_seen():
    """A sample among the held-out ones that is ten times too slow shows in their errors, one among the others not."""
    samples, _ = made_up(SSM)
    test = np.flatnonzero(np.random.default_rng(0).permutation(len(samples)) % 4 == 0)
    spoiled = list(samples)
    for i in test:
        spoiled[i] = replace(samples[i], us=samples[i].us * 10)
    held_out = fit(spoiled, CONFIG, {}).held_out["ssm"]
    assert held_out.median == pytest.approx(0.9) and held_out.p90 == pytest.approx(0.9)


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_noise_of_the_samples_bounds_the_error(noise):
    samples, _ = made_up(ATTENTION, noise)
    held_out = fit(samples, CONFIG, {}).held_out["attention"]
    assert 0.3 * noise < held_out.median < 1.3 * noise


def test_too_few_samples_are_refused():
    samples, _ = made_up(SSM)
    with pytest.raises(ValueError, match="16 samples of ssm are too few to fit 13 terms: measure more"):
        fit(samples[:16], CONFIG, {})


# --- where profiles are kept ----------------------------------------------------------------------------------


@pytest.fixture
def home(monkeypatch, tmp_path):
    """A user's cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "flexops" / "profiles"


def key_of(config: FlexHybridConfig = CONFIG, dtype: torch.dtype = torch.float32) -> dict:
    return profiling.profile_key(config, dtype, CPU)


def a_profile(key: dict, us: float = 1.0) -> BranchProfile:
    return BranchProfile(key, {"ssm": [us, 2.5]}, {"ssm": HeldOut(0.01, 0.02, 0.03, 9)})


OTHER_SHAPES = {
    "hidden_size": FlexHybridConfig(hidden_size=256, num_attention_heads=4),
    "intermediate_size": FlexHybridConfig(intermediate_size=512),
    "num_hidden_layers": FlexHybridConfig(num_hidden_layers=3),
    "parts": FlexHybridConfig(layer_routes=["attention"] * 12),
}


def test_saved_and_loaded(tmp_path):
    path = tmp_path / "deep" / "profile.json"
    a_profile(key_of()).save(path)
    assert BranchProfile.load(path) == a_profile(key_of())
    assert json.loads(path.read_text())["key"]["dtype"] == "float32"
    for broken in ("{ cut short", "[]", '{"key": {}}', '{"key": {}, "coefficients": {}, "held_out": {"ssm": {}}}'):
        path.write_text(broken)
        with pytest.raises(ValueError, match=r"profile.json' cannot be read .*: take one with `flexops profile`"):
            BranchProfile.load(path)
    with pytest.raises(ValueError, match="cannot be read"):
        BranchProfile.load(tmp_path / "nowhere.json")


def test_what_a_profile_holds_for():
    assert key_of()["parts"] == ["attention", "ssm", "ffn"]
    assert key_of(FlexHybridConfig(intermediate_size=0, layer_routes=["ssm"] * 12))["parts"] == ["ssm"]
    key = key_of(FlexHybridConfig())
    others = [(name, key_of(config)) for name, config in OTHER_SHAPES.items()]
    others += [
        (name, {**key, name: "another"}) for name in ("dtype", "device", "threads", "format", "flexops", "torch")
    ]
    for name, other in others:
        assert f"its {name} is " in a_profile(key).mismatch(other), name
        assert profiling.profile_path(other) != profiling.profile_path(key)
    assert a_profile(key).mismatch({**key, "device": "B"}) == f"its device is {key['device']!r}, here 'B'"
    assert a_profile(key).mismatch(dict(key)) == ""


def test_the_users_cache_folder(monkeypatch, home):
    assert profiling.profile_path(key_of()).parent == home
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(profiling.profile_path(key_of())).startswith("/home/somebody/.cache/flexops/profiles/flexops-profile-")
    assert profiling.profile_path(key_of()).suffix == ".json"


def test_found_beside_the_model_first_and_else_in_the_users_cache(home, tmp_path, caplog):
    key, model = key_of(), tmp_path / "model"
    assert find_profile(key, model) is None and find_profile(key, "") is None
    model.mkdir()
    a_profile(key, 1.0).save(profiling.profile_path(key))
    assert find_profile(key, model) == find_profile(key, "") == find_profile(key, "some/name") == a_profile(key, 1.0)
    a_profile(key, 2.0).save(profiling.profile_path(key, model))
    assert find_profile(key, str(model)) == a_profile(key, 2.0)
    assert find_profile(key, "") == a_profile(key, 1.0)
    assert caplog.text == ""


def test_one_of_several_beside_the_model_fits(home, tmp_path, caplog):
    keys = [key_of(dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    for us, key in enumerate(keys):
        a_profile(key, us).save(profiling.profile_path(key, tmp_path))
    assert [find_profile(key, tmp_path) for key in keys] == [a_profile(key, us) for us, key in enumerate(keys)]
    assert caplog.text == ""


def test_what_is_beside_the_model_and_does_not_fit_is_named_once(home, tmp_path, caplog):
    for config in OTHER_SHAPES.values():
        a_profile(key_of(config)).save(profiling.profile_path(key_of(config), tmp_path))
    assert find_profile(key_of(FlexHybridConfig()), tmp_path) is None
    (record,) = caplog.records
    assert "costs are estimated, not measured: profile" in record.getMessage() and "here" in record.getMessage()
    caplog.clear()
    a_profile(key_of(FlexHybridConfig())).save(profiling.profile_path(key_of(FlexHybridConfig())))
    assert find_profile(key_of(FlexHybridConfig()), tmp_path) is not None and caplog.text == ""
    profiling.profile_path(key_of(FlexHybridConfig())).write_text("{ cut short")
    assert find_profile(key_of(FlexHybridConfig()), "") is None
    assert len(caplog.records) == 1 and "cannot be read" in caplog.text


def test_a_file_that_is_asked_for_must_fit(home, tmp_path):
    key, path = key_of(), tmp_path / "mine.json"
    with pytest.raises(ValueError, match=r"mine.json' cannot be read"):
        find_profile(key, "", path)
    a_profile(key, 3.0).save(path)
    a_profile(key, 1.0).save(profiling.profile_path(key))
    assert find_profile(key, "", str(path)) == a_profile(key, 3.0)
    with pytest.raises(ValueError, match=r"does not fit: its dtype is 'float32', here 'bfloat16'; take one with"):
        find_profile(key_of(dtype=torch.bfloat16), "", path)
