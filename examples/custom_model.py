"""A model of your own on flexops' operators: a ragged batch whose requests take different branches, on the CPU.

Three prompts of 5, 1 and 12 tokens are prefilled in one packed batch and decoded together. In every layer some requests
go through attention and the others through an SSM, as ROUTES says; an adaptive model would ask a gate instead.
`plain_logits` computes the same model densely, one request at a time, without caches or flexops, and checks the result.

    python examples/custom_model.py
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexops import kernels as fk

PROMPTS = (5, 1, 12)
NEW_TOKENS = 6
# ROUTES[layer][request]
ROUTES = (
    (fk.ATTENTION, fk.SSM, fk.SSM),
    (fk.SSM, fk.ATTENTION, fk.ATTENTION),
    (fk.ATTENTION, fk.ATTENTION, fk.ATTENTION),
)
VOCAB, HIDDEN, FFN = 256, 64, 128
HEADS, KV_HEADS, HEAD_DIM, PAGE_TOKENS = 4, 2, 16, 16
SSM_HEADS, SSM_HEAD_DIM, STATE, CONV, CHUNK = 4, 32, 16, 4, 16
INNER, CHANNELS = SSM_HEADS * SSM_HEAD_DIM, SSM_HEADS * SSM_HEAD_DIM + 2 * STATE
EPS = 1e-5


class Layer(nn.Module):
    """Weights of one layer: both branches and the FFN."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ffn_norm, self.ssm_norm = (nn.Parameter(torch.ones(n)) for n in (HIDDEN, HIDDEN, INNER))
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.attention_out = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.ssm_in = nn.Linear(HIDDEN, INNER + CHANNELS + SSM_HEADS, bias=False)
        self.conv = nn.Parameter(torch.randn(CHANNELS, CONV) / 2)
        self.conv_bias = nn.Parameter(torch.zeros(CHANNELS))
        self.A_log = nn.Parameter(torch.linspace(1, 8, SSM_HEADS).log())
        self.D = nn.Parameter(torch.ones(SSM_HEADS))
        self.dt_bias = nn.Parameter(torch.full((SSM_HEADS,), -2.0))
        self.ssm_out = nn.Linear(INNER, HIDDEN, bias=False)
        self.gate_up = nn.Linear(HIDDEN, 2 * FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def ffn(self, u: Tensor) -> Tensor:
        gate, up = self.gate_up(u).chunk(2, dim=-1)
        return self.down(fk.silu_mul(gate, up))

    def project_ssm(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """z, xBC and dt: slices of one projection, passed to the operators as they are."""
        z, xBC, dt = self.ssm_in(u).split([INNER, CHANNELS, SSM_HEADS], dim=-1)
        return z, xBC, dt


class Caches:
    """Pages of one layer for all requests: a table of KV pages, and one page each for conv window and SSM state."""

    def __init__(self, requests: int, max_tokens: int) -> None:
        pages = -(-max_tokens // PAGE_TOKENS)
        self.kv = torch.empty(requests * pages, 2, KV_HEADS, PAGE_TOKENS, HEAD_DIM)
        self.kv_table = torch.randperm(requests * pages, dtype=torch.int32).view(requests, pages)
        self.conv = torch.empty(requests, CONV, CHANNELS)
        self.state = torch.empty(requests, SSM_HEADS, SSM_HEAD_DIM, STATE)
        self.own_page = torch.arange(requests, dtype=torch.int32).unsqueeze(1)


@dataclass
class Part:
    """The packed rows that go through one branch of one layer.

    requests: [r] int64, which requests.  rows: [t] int32, their packed rows.  cu_seqlens: [r+1] int32, bounds of the
    requests within rows.  positions: [t] int32, absolute.  starts: [r] int32, position of each request's first row.
    """

    requests: Tensor
    rows: Tensor
    cu_seqlens: Tensor
    positions: Tensor
    starts: Tensor


def part_of(routes: tuple[int, ...], branch: int, lengths: list[int], starts: list[int]) -> Part:
    """The rows of the requests that take this branch, in a batch of `lengths[r]` rows from position `starts[r]` on."""
    first_row = [sum(lengths[:r]) for r in range(len(lengths))]
    chosen = [r for r, route in enumerate(routes) if route == branch]
    rows = [row for r in chosen for row in range(first_row[r], first_row[r] + lengths[r])]
    positions = [p for r in chosen for p in range(starts[r], starts[r] + lengths[r])]
    bounds = [0, *torch.tensor([lengths[r] for r in chosen], dtype=torch.int32).cumsum(0).tolist()]
    ints = [torch.tensor(t, dtype=torch.int32) for t in (rows, bounds, positions, [starts[r] for r in chosen])]
    return Part(torch.tensor(chosen, dtype=torch.long), *ints)


class HybridModel(nn.Module):
    """Embedding, layers and head; `forward` takes one packed batch, prefill and decode alike."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in ROUTES)
        self.final_norm = nn.Parameter(torch.ones(HIDDEN))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        angles = torch.arange(128).unsqueeze(1) / 10000 ** (torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
        self.register_buffer("cos_sin", torch.cat([angles.cos(), angles.sin()], dim=1))

    def forward(self, tokens: Tensor, lengths: list[int], starts: list[int], caches: list[Caches]) -> Tensor:
        """tokens [T] of len(lengths) requests, packed; starts[r] tokens of request r are cached.  Logits [T, VOCAB]."""
        residual, delta = self.embedding(tokens), None
        for layer, cache, routes in zip(self.layers, caches, ROUTES, strict=True):
            attention, ssm = (part_of(routes, branch, lengths, starts) for branch in (fk.ATTENTION, fk.SSM))
            # 1. the last FFN's output is added, the norm taken and the rows sorted by branch, in one pass
            order = torch.cat([attention.rows, ssm.rows])
            u = fk.split_norm(residual, delta, layer.norm, EPS, order)
            # 2. the branches work on compact rows
            u_attention, u_ssm = u.split([len(attention.rows), len(ssm.rows)])
            y_attention = self.attend(layer, u_attention, attention, cache)
            y_ssm = self.scan(layer, u_ssm, ssm, cache)
            # 3. rows go back to their places, are added, and the FFN's norm is taken, in one pass
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(len(order), dtype=torch.int32)
            delta = layer.ffn(fk.merge_norm(residual, y_attention, y_ssm, inverse, layer.ffn_norm, EPS))
        return self.head(fk.rms_norm(residual + delta, self.final_norm, EPS))

    def attend(self, layer: Layer, u: Tensor, part: Part, cache: Caches) -> Tensor:
        """Attention of new rows over the pages of their requests, their own keys and values included."""
        if not len(u):
            return u
        q, k, v = layer.qkv(u).unflatten(1, (-1, HEAD_DIM)).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        lengths = part.cu_seqlens.diff()
        table = cache.kv_table[part.requests]
        request = torch.repeat_interleave(lengths)
        pages = table[request, part.positions // PAGE_TOKENS].long()
        slots = pages * PAGE_TOKENS + part.positions % PAGE_TOKENS
        q = fk.append_kv(q, k, v, self.cos_sin, part.positions, cache.kv, slots)
        scale, longest = HEAD_DIM**-0.5, int(lengths.max())
        y = fk.paged_attention(q, cache.kv, table, part.cu_seqlens, part.starts + lengths, scale, longest)
        return layer.attention_out(y.flatten(1))

    def scan(self, layer: Layer, u: Tensor, part: Part, cache: Caches) -> Tensor:
        """The SSM over new rows: one fused step where each request has one, else convolution and scan."""
        if not len(u):
            return u
        z, xBC, dt = layer.project_ssm(u)
        pages = cache.own_page[part.requests]
        before = torch.where(part.starts.unsqueeze(1) > 0, pages, -1)  # -1: nothing cached, start from zeros
        if len(u) == len(part.requests):
            conv_weights, ssm_weights = (layer.conv, layer.conv_bias), (layer.A_log, layer.D, layer.dt_bias)
            caches = (cache.conv, before, pages, cache.state, before, pages)
            y, squares = fk.state_update(xBC, z, dt, *conv_weights, *ssm_weights, part.positions, *caches)
            return layer.ssm_out(fk.finish_gated_norm(y, squares, layer.ssm_norm, EPS, n_groups=1))
        bounds = (part.cu_seqlens, part.starts)
        xBC = fk.causal_conv1d(xBC, layer.conv, layer.conv_bias, *bounds, cache.conv, before, pages)
        x, B, C = xBC.split([INNER, STATE, STATE], dim=1)
        x, B, C = x.unflatten(1, (SSM_HEADS, -1)), B.unsqueeze(1), C.unsqueeze(1)
        weights = (layer.D, layer.dt_bias)
        y = fk.ssd_scan(x, dt, layer.A_log, B, C, *weights, *bounds, CHUNK, cache.state, before, pages)
        return layer.ssm_out(fk.gated_rms_norm(y.flatten(1), z, layer.ssm_norm, EPS, n_groups=1))


# --- the same model without flexops ---------------------------------------------------------------------------


def plain_attention(layer: Layer, u: Tensor, cos_sin: Tensor) -> Tensor:
    q, k, v = layer.qkv(u).unflatten(1, (-1, HEAD_DIM)).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    cos, sin = cos_sin[: len(u)].unsqueeze(1).chunk(2, dim=-1)

    def rotate(t: Tensor) -> Tensor:
        a, b = t.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (rotate(q), rotate(k), v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return layer.attention_out(y[0].transpose(0, 1).flatten(1))


def plain_ssm(layer: Layer, u: Tensor) -> Tensor:
    z, xBC, dt = layer.project_ssm(u)
    padded = F.pad(xBC.T, (CONV - 1, 0)).unsqueeze(0)
    xBC = F.silu(F.conv1d(padded, layer.conv.unsqueeze(1), layer.conv_bias, groups=CHANNELS))[0].T
    x, B, C = xBC.split([INNER, STATE, STATE], dim=1)
    x, dt = x.unflatten(1, (SSM_HEADS, -1)), F.softplus(dt + layer.dt_bias)
    state, rows = torch.zeros(SSM_HEADS, SSM_HEAD_DIM, STATE), []
    for t in range(len(u)):
        decay = torch.exp(-torch.exp(layer.A_log) * dt[t])
        state = decay[:, None, None] * state + (dt[t][:, None] * x[t])[..., None] * B[t]
        rows.append((state @ C[t] + layer.D[:, None] * x[t]).flatten())
    gated = torch.stack(rows) * F.silu(z)
    return layer.ssm_out(F.rms_norm(gated, (INNER,), layer.ssm_norm, EPS))


def plain_logits(model: HybridModel, tokens: Tensor, request: int) -> Tensor:
    """Logits [length, VOCAB] of one request's whole sequence, in one dense pass."""
    h = model.embedding(tokens)
    for layer, routes in zip(model.layers, ROUTES, strict=True):
        u = F.rms_norm(h, (HIDDEN,), layer.norm, EPS)
        h = h + (plain_attention(layer, u, model.cos_sin) if routes[request] == fk.ATTENTION else plain_ssm(layer, u))
        gate, up = layer.gate_up(F.rms_norm(h, (HIDDEN,), layer.ffn_norm, EPS)).chunk(2, dim=-1)
        h = h + layer.down(F.silu(gate) * up)
    return model.head(F.rms_norm(h, (HIDDEN,), model.final_norm, EPS))


@torch.no_grad()
def main() -> float:
    """Generate for all prompts at once, compare with the dense computation, and return the largest difference."""
    torch.manual_seed(0)
    model = HybridModel()
    caches = [Caches(len(PROMPTS), max(PROMPTS) + NEW_TOKENS) for _ in ROUTES]
    sequences = [torch.randint(VOCAB, (n,)).tolist() for n in PROMPTS]
    names = {fk.ATTENTION: "attention", fk.SSM: "ssm"}
    for r, prompt in enumerate(sequences):
        print(f"request {r}: {len(prompt)} tokens, layers {' '.join(names[routes[r]] for routes in ROUTES)}")

    print(f"prefill: {sum(PROMPTS)} tokens of {len(PROMPTS)} requests in one packed batch")
    lengths, starts = list(PROMPTS), [0] * len(PROMPTS)
    tokens = torch.tensor([t for sequence in sequences for t in sequence])
    seen: list[list[Tensor]] = [[] for _ in PROMPTS]
    for _ in range(NEW_TOKENS):
        logits = model(tokens, lengths, starts, caches).split(lengths)
        for r, rows in enumerate(logits):
            seen[r].append(rows)
            sequences[r].append(int(rows[-1].argmax()))
        starts = [s + n for s, n in zip(starts, lengths, strict=True)]
        lengths, tokens = [1] * len(PROMPTS), torch.tensor([sequence[-1] for sequence in sequences])
    print(f"decode: {NEW_TOKENS - 1} steps of {len(PROMPTS)} tokens")

    worst = 0.0
    for r, sequence in enumerate(sequences):
        ours, plain = torch.cat(seen[r]), plain_logits(model, torch.tensor(sequence[:-1]), r)
        same_tokens = plain[PROMPTS[r] - 1 :].argmax(-1).tolist() == sequence[PROMPTS[r] :]
        difference = float((ours - plain).abs().max())
        print(f"request {r}: generated {sequence[PROMPTS[r] :]}, largest difference of a logit {difference:.1e}")
        if not same_tokens or difference > 1e-4:
            raise SystemExit(f"request {r} differs from the dense computation")
        worst = max(worst, difference)
    print("the dense computation gives the same tokens")
    return worst


if __name__ == "__main__":
    main()
