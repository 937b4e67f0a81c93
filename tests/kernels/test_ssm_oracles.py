"""The SSM operators against code that is not ours: transformers' mixers and mamba_ssm's reference functions."""

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch

from flexops.kernels import reference
from tests.kernels.helpers import DEVICE, cu_seqlens, ints, pages, randn, triton_module

triton_forms = {name: triton_module(name) for name in ("causal_conv1d", "ssd_scan", "state_update")}
FORMS = ["reference", "triton"]
LENGTHS = [21, 1, 5]
DECODES = 3


def form(kernels: str, name: str):
    return getattr(reference if kernels == "reference" else triton_forms[name], name)


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    """Both sum in fp32, in orders of their own."""
    torch.testing.assert_close(
        ours, theirs, rtol=1e-4, atol=2e-5 * float(theirs.abs().max()), msg=lambda m: f"{what}: {m}"
    )


def transformers_mixer(name: str, groups: int):
    """A mixer with random weights, and a fresh cache for it."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1}
    if name == "Mamba2":
        own = {"num_heads": 4, "head_dim": 16, "state_size": 16, "conv_kernel": 4, "chunk_size": 8, "n_groups": groups}
    else:
        own = {f"mamba_{k}": v for k, v in {"n_heads": 4, "d_head": 16, "d_state": 16, "d_conv": 4}.items()}
        own |= {"mamba_chunk_size": 8, "mamba_n_groups": groups, "attn_layer_indices": []}
    config = getattr(transformers, f"{name}Config")(**sizes, **own)
    modeling = importlib.import_module(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
    torch.manual_seed(0)
    mixer = getattr(modeling, f"{name}Mixer")(config, layer_idx=0).to(DEVICE).eval()
    for seed, parameter in enumerate(mixer.parameters()):
        parameter.data = randn(*parameter.shape, seed=seed, scale=0.5)
    mixer.A_log.data = torch.linspace(1, 16, 4, device=DEVICE).log()
    return mixer, lambda: transformers.DynamicCache(config=config)


@pytest.mark.parametrize("kernels", FORMS)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", ["Mamba2", "Bamba"])
@torch.no_grad()
def test_transformers_mixer(name, groups, kernels):
    """Ragged prompts in one packed prefill, then decode steps, against the mixer on each prompt alone."""
    mixer, new_cache = transformers_mixer(name, groups)
    d_inner, group_states, count = 64, groups * 16, len(LENGTHS)
    hidden = [randn(n + DECODES, 32, seed=20 + n) for n in LENGTHS]
    projected = [mixer.in_proj(h).split([d_inner, d_inner + 2 * group_states, 4], dim=-1) for h in hidden]
    weight, bias = mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias
    windows, states = pages(count, 4, d_inner + 2 * group_states), pages(count, 4, 16, 16)
    own = ints([[r] for r in range(count)])

    z, xBC, dt = (torch.cat([p[i][:n] for p, n in zip(projected, LENGTHS, strict=True)]) for i in range(3))
    batch = (cu_seqlens(LENGTHS), ints([0] * count))
    channels = form(kernels, "causal_conv1d")(xBC, weight, bias, *batch, windows, None, own)
    x, B, C = channels.split([d_inner, group_states, group_states], dim=1)
    x, B, C = x.unflatten(1, (4, 16)), B.unflatten(1, (groups, 16)), C.unflatten(1, (groups, 16))
    heads = (mixer.D, mixer.dt_bias)
    y = form(kernels, "ssd_scan")(x, dt, mixer.A_log, B, C, *heads, *batch, 16, states, None, own)
    norm = (mixer.norm.weight, mixer.norm.variance_epsilon, groups)
    rows = list(reference.gated_rms_norm(y.flatten(1), z, *norm).split(LENGTHS))
    for step in range(DECODES):
        z, xBC, dt = (torch.stack([p[i][n + step] for p, n in zip(projected, LENGTHS, strict=True)]) for i in range(3))
        caches = (ints([n + step for n in LENGTHS]), windows, own, own, states, own, own)
        gated, sums = form(kernels, "state_update")(xBC, z, dt, weight, bias, mixer.A_log, *heads, *caches)
        decoded = reference.finish_gated_norm(gated, sums, *norm)
        rows = [torch.cat([row, new[None]]) for row, new in zip(rows, decoded, strict=True)]

    for r, n in enumerate(LENGTHS):
        cache = new_cache()
        theirs = [mixer(hidden[r][None, :n], cache)[0]]
        theirs += [mixer(hidden[r][None, t : t + 1], cache)[0] for t in range(n, n + DECODES)]
        assert_near(mixer.out_proj(rows[r]), torch.cat(theirs), f"sequence of {n}")
        assert_near(states[r], cache.get_recurrent_state(0)[0], f"state of {n}")


@pytest.fixture
def mamba_ssm(monkeypatch):
    """Imports of mamba_ssm's modules, without its package's __init__, which needs a compiled extension."""
    pytest.importorskip("einops")
    spec = find_spec("mamba_ssm")
    if spec is None:
        pytest.skip("mamba_ssm is not installed")
    package = ModuleType("mamba_ssm")
    package.__path__, package.__spec__ = list(spec.submodule_search_locations or []), spec
    monkeypatch.setitem(sys.modules, "mamba_ssm", package)
    return lambda name: importlib.import_module(f"mamba_ssm.ops.triton.{name}")


def scan_inputs(tokens: int):
    x, dt, A_log = randn(tokens, 4, 16, seed=1), randn(tokens, 4, seed=2), torch.linspace(1, 16, 4, device=DEVICE).log()
    B, C = randn(tokens, 2, 32, seed=3), randn(tokens, 2, 32, seed=4)
    return x, dt, A_log, B, C, randn(4, seed=5), randn(4, seed=6) - 2


@pytest.mark.parametrize("kernels", FORMS)
def test_mamba_ssm_scan(kernels, mamba_ssm):
    theirs = mamba_ssm("ssd_combined").ssd_chunk_scan_combined_ref
    x, dt, A_log, B, C, D, dt_bias = scan_inputs(48)
    ours = form(kernels, "ssd_scan")(x, dt, A_log, B, C, D, dt_bias, cu_seqlens([48]), ints([0]), 16)
    batch = [t[None] for t in (x, dt, B, C)]
    exact = theirs(*batch[:2], -A_log.exp(), *batch[2:], 16, D=D, dt_bias=dt_bias, dt_softplus=True)
    assert_near(ours, exact[0], "y")


@pytest.mark.parametrize("kernels", FORMS)
def test_mamba_ssm_state_update(kernels, mamba_ssm):
    theirs = mamba_ssm("selective_state_update").selective_state_update_ref
    x, dt, A_log, B, C, D, dt_bias = scan_inputs(3)
    states, z, own = randn(3, 4, 16, 32, seed=7), randn(3, 64, seed=8), ints([[0], [1], [2]])
    # a convolution that passes its newest input on, so that silu of it is what their function gets
    xBC = torch.cat([x.flatten(1), B.flatten(1), C.flatten(1)], dim=1)
    weight = torch.tensor([0.0, 1.0], device=DEVICE).expand(xBC.shape[1], 2).contiguous()
    x, B, C = (torch.nn.functional.silu(t) for t in (x, B, C))
    per_head = [t[..., None].expand(*t.shape, 16) for t in (dt, D, dt_bias)]
    A = -A_log.exp()[:, None, None].expand(4, 16, 32)
    after = states.clone()
    exact = theirs(after, x, per_head[0], A, B, C, per_head[1], z.view(3, 4, 16), dt_bias=per_head[2], dt_softplus=True)
    windows = torch.zeros(3, 2, xBC.shape[1], device=DEVICE)
    caches = (ints([0, 1, 2]), windows, own, own, states, own, own)
    gated, sums = form(kernels, "state_update")(xBC, z, dt, weight, None, A_log, D, dt_bias, *caches)
    assert_near(gated, exact.flatten(1), "y")
    assert_near(sums, exact.square().sum(-1), "sums of squares")
    assert_near(states, after, "state")
