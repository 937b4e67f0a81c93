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
from flexops.runtime.profiling import BranchLoad, BranchProfile, HeldOut, Sample, fit, terms

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
    products = 512 * 64 * 20 / 1e6  # a row of q, k, v and output projections
    expected = [1, 1, 1, 0, *(products * n for n in (2, 6, 24, 8, 0, 0)), 1]
    pairs, heads = 38 * 39 / 2, 8 * 64 / 1e6
    assert terms(ATTENTION, load, CONFIG) == pytest.approx([*expected, 2, pairs * heads, 38 * heads, 110 * heads])
    products, state = 512 * (2 * 1024 + 1280 + 16) / 1e6, 1024 * 128 / 1e6
    expected = [1, 1, 1, 0, *(products * n for n in (2, 6, 24, 8, 0, 0)), 1]
    assert terms(SSM, load, CONFIG) == pytest.approx([*expected, 38 * state, 2 * state])
    assert terms(SSM, BranchLoad.of(decodes=[5]), CONFIG)[:4].tolist() == [1, 1, 0, 1]
    assert terms(SSM, BranchLoad.of(prefills=[(5, 0)]), CONFIG)[:4].tolist() == [1, 0, 1, 0]


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


def made_up(route: int, noise: float = 0.0, seed: int = 0) -> tuple[list[Sample], np.ndarray]:
    """Samples of a branch whose terms cost what they cost, with relative noise, and these costs."""
    rng = np.random.default_rng(seed)
    size = len(terms(route, LOADS[0], CONFIG))
    true = rng.uniform(0.5, 2.0, size) * [30, 10, 12, 9, *[5] * 6, 3, *[40] * (size - 11)]
    times = [terms(route, load, CONFIG) @ true * np.exp(noise * rng.normal()) for load in LOADS]
    return [Sample(route, load, float(us), spread=noise) for load, us in zip(LOADS, times, strict=True)], true


@pytest.mark.parametrize("route", [ATTENTION, SSM])
def test_a_fit_without_noise_is_exact(route):
    samples, true = made_up(route)
    profile = fit(samples, CONFIG, {"model": 1})
    name = profiling.ROUTE_NAMES[route]
    assert list(profile.coefficients) == [name] and min(profile.coefficients[name]) >= 0
    held_out = profile.held_out[name]
    assert held_out.p90 < 1e-6 and held_out.count == 30 and held_out.spread == 0.0
    new = BranchLoad.of(decodes=[7, 300], prefills=[(100, 50)])
    assert profile.predict_us(route, new, CONFIG) == pytest.approx(terms(route, new, CONFIG) @ true, rel=1e-5)


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


def test_stored_and_loaded_for_the_same_model_alone(tmp_path):
    key = profiling.profile_key(CONFIG, torch.bfloat16, CPU)
    profile = BranchProfile(key, {"ssm": [1.0, 2.5]}, {"ssm": HeldOut(0.01, 0.02, 0.03, 9)})
    path = tmp_path / "deep" / "profile.json"
    assert BranchProfile.load(path, key) is None
    profile.save(path)
    assert BranchProfile.load(path, key) == profile
    assert json.loads(path.read_text())["key"]["dtype"] == "bfloat16"
    for other in (
        profiling.profile_key(FlexHybridConfig(hidden_size=256, num_attention_heads=4), torch.bfloat16, CPU),
        profiling.profile_key(CONFIG, torch.float32, CPU),
        {**key, "device": "another"},
        {**key, "flexops": "0.0.0"},
        {**key, "format": 0},
    ):
        assert other != key and BranchProfile.load(path, other) is None
        assert profiling.profile_path(other) != profiling.profile_path(key)
    path.write_text("{ cut short")
    assert BranchProfile.load(path, key) is None


def test_profiles_are_kept_in_the_users_cache(monkeypatch, tmp_path):
    key = profiling.profile_key(CONFIG, torch.float32, CPU)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert profiling.profile_path(key).parent == tmp_path / "flexops" / "profiles"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(profiling.profile_path(key)).startswith("/home/somebody/.cache/flexops/profiles/")
    assert profiling.profile_path(key).suffix == ".json"
