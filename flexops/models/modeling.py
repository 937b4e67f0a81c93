"""FlexHybridModel: embedding, request-adaptive layers, head. A transformers PreTrainedModel.

`forward` runs whole sequences without a cache (training, evaluation); `generate` hands the prompts to the engine.
"""

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.utils import ModelOutput

from .. import kernels as fk
from ..config import FlexHybridConfig
from .gate import PrefillGate
from .layout import Layout, resolve_layout
from .mixers import AttentionMixer, Mamba2Mixer, RMSNorm, SwiGLU, rope_table

Routing = Literal["soft", "straight_through", "hard"]


@dataclass
class FlexHybridOutput(ModelOutput):
    """What `forward` returns.

    loss: lm_loss + route_cost_weight * route_cost (Eq. 4), where labels were given.  logits: [B, S, vocab], zero at
    padding.  gate_probs: [B, num_layers, 2], probabilities (attention, ssm) of every layer; fixed layers have 0 or 1.
    layouts: int32 [B, num_layers], the top-1 routes.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    lm_loss: Tensor | None = None
    route_cost: Tensor | None = None
    gate_probs: Tensor | None = None
    layouts: Tensor | None = None


class FlexHybridLayer(nn.Module):
    """One layer: norm, gate, the chosen branch, residual, norm, FFN, residual (§4)."""

    def __init__(self, config: FlexHybridConfig, layer_idx: int) -> None:
        super().__init__()
        self.routes = config.layer_routes[layer_idx]
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = AttentionMixer(config) if self.routes != "ssm" else None
        self.ssm = Mamba2Mixer(config) if self.routes != "attention" else None
        self.gate = PrefillGate(config) if self.routes == "adaptive" else None
        has_ffn = config.has_ffn(layer_idx)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if has_ffn else None
        self.ffn = SwiGLU(config) if has_ffn else None

    def route(self, u: Tensor, seqs: "_Sequences", forced: Tensor | None) -> tuple[Tensor, Tensor]:
        """Probabilities [R, 2] and routes [R] of sequences with layer inputs u; `forced` [R] wins (-1: gate)."""
        if self.gate is None:
            fixed = fk.ATTENTION if self.ssm is None else fk.SSM
            routes = torch.full((len(seqs.lengths),), fixed, dtype=torch.int32, device=u.device)
            return F.one_hot(routes.long(), 2).float(), routes
        probs, routes = self.gate(u, seqs.cu_seqlens, seqs.prompt_lengths, seqs.gate_bias)
        if forced is not None:
            routes = torch.where(forced >= 0, forced, routes)
            probs = torch.where((forced >= 0).unsqueeze(-1), F.one_hot(routes.long(), 2).float(), probs)
        return probs, routes

    def mix(self, u: Tensor, seqs: "_Sequences", weights: Tensor) -> Tensor:
        """p_attn * attention(u) + p_ssm * ssm(u) with weights [R, 2] per sequence (Eq. 3)."""
        branches = []
        if self.attention is not None:
            branches.append(self.attention(u, seqs.cu_seqlens, seqs.positions, seqs.cos_sin))
        if self.ssm is not None:
            branches.append(self.ssm(u, seqs.cu_seqlens))
        if len(branches) == 1:
            return branches[0]
        per_token = weights[seqs.request].to(u.dtype)
        return per_token[:, :1] * branches[0] + per_token[:, 1:] * branches[1]

    def split_and_merge(self, u: Tensor, seqs: "_Sequences", routes: Tensor) -> Tensor:
        """Each sequence through its own branch: split into compact rows, run, merge back (§5.1)."""
        assert self.attention is not None and self.ssm is not None, "only a layer with both branches splits"
        merged = torch.zeros_like(u)
        token_route = routes[seqs.request]
        for route in (fk.ATTENTION, fk.SSM):
            rows = (token_route == route).nonzero().squeeze(1).to(torch.int32)
            if not rows.numel():
                continue
            lengths = seqs.cu_seqlens.diff()[routes == route]
            cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
            compact = fk.gather_rows(u, rows)
            if route == fk.ATTENTION:
                y = self.attention(compact, cu_seqlens, seqs.positions[rows.long()], seqs.cos_sin)
            else:
                y = self.ssm(compact, cu_seqlens)
            merged = fk.scatter_rows(merged, y, rows)
        return merged

    def forward(
        self, h: Tensor, seqs: "_Sequences", forced: Tensor | None, routing: Routing
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Packed rows h [T, hidden_size] through the layer; returns rows, probabilities [R, 2] and routes [R]."""
        u = self.input_norm(h)
        probs, routes = self.route(u, seqs, forced)
        if routing == "hard" and self.gate is not None:
            h = h + self.split_and_merge(u, seqs, routes)
        else:
            weights = probs
            if routing == "straight_through":  # the hard choice forward, the soft gradient backward
                weights = F.one_hot(routes.long(), 2).to(probs.dtype) - probs.detach() + probs
            h = h + self.mix(u, seqs, weights)
        if self.ffn is not None and self.ffn_norm is not None:
            h = h + self.ffn(self.ffn_norm(h))
        return h, probs, routes


@dataclass(frozen=True)
class _Sequences:
    """Where the sequences of a packed forward lie."""

    lengths: list[int]
    cu_seqlens: Tensor  # int32 [R+1]
    positions: Tensor  # int32 [T]
    request: Tensor  # int64 [T], the sequence of each row
    prompt_lengths: Tensor  # int64 [R]
    cos_sin: Tensor | None
    gate_bias: Tensor | None


class FlexHybridPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation."""

    config_class = FlexHybridConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = False
    _no_split_modules = ["FlexHybridLayer"]
    _is_stateful = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        residual_std = std / math.sqrt(2 * self.config.num_hidden_layers)
        if isinstance(module, nn.Linear | nn.Embedding):
            _init(module.weight, lambda w: w.normal_(0.0, std))
            _init(getattr(module, "bias", None), torch.Tensor.zero_)
        elif isinstance(module, RMSNorm):
            _init(module.weight, lambda w: w.fill_(1.0))
        elif isinstance(module, PrefillGate):
            _init(module.w1, lambda w: w.normal_(0.0, w.shape[1] ** -0.5))
            _init(module.w2, lambda w: w.normal_(0.0, w.shape[1] ** -0.5))
            _init(module.b1, torch.Tensor.zero_)
            _init(module.b2, torch.Tensor.zero_)
        elif isinstance(module, AttentionMixer):
            _init(module.o_proj.weight, lambda w: w.normal_(0.0, residual_std))
        elif isinstance(module, SwiGLU):
            _init(module.down_proj.weight, lambda w: w.normal_(0.0, residual_std))
        elif isinstance(module, Mamba2Mixer):
            _init(module.out_proj.weight, lambda w: w.normal_(0.0, residual_std))
            bound = module.conv1d.weight.shape[-1] ** -0.5
            _init(module.conv1d.weight, lambda w: w.uniform_(-bound, bound))
            _init(module.conv1d.bias, torch.Tensor.zero_)
            _init(module.A_log, lambda w: w.uniform_(1.0, 16.0).log_())
            # dt starts log-uniform in [1e-3, 1e-1]; its bias is the inverse of softplus
            _init(module.dt_bias, lambda w: w.uniform_(math.log(1e-3), math.log(1e-1)).exp_().expm1_().log_())
            _init(module.D, lambda w: w.fill_(1.0))


def _init(param: Tensor | None, fill: Any) -> None:
    """Fill a parameter unless it was just loaded from a checkpoint."""
    if param is not None and not getattr(param, "_is_hf_initialized", False):
        fill(param.data)


class FlexHybridModel(FlexHybridPreTrainedModel, GenerationMixin):
    """A causal language model whose layers choose attention or Mamba-2 per request.

    `forward` for training and evaluation, `generate` (transformers' contract, plus `layout=` and `gate_bias=`) for
    inference; `save_pretrained` / `from_pretrained` and AutoModelForCausalLM work as for any transformers model.
    """

    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}

    def __init__(self, config: FlexHybridConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(FlexHybridLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> "FlexHybridModel":
        """A transformers model (Llama, Mamba-2, Bamba) as a fixed layout, sharing its weights; see `models.loading`."""
        from .loading import from_model

        return from_model(model)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embed_tokens = value

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.lm_head = new_embeddings

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        prompt_lengths: Tensor | None = None,
        layout: Layout | list[Layout] = None,
        gate_bias: float | Tensor = 0.0,
        routing: Routing | None = None,
        route_cost_weight: float | None = None,
        return_dict: bool | None = None,
    ) -> FlexHybridOutput | tuple[Tensor, ...]:
        """Whole sequences through the model, without a cache.

        input_ids: int64 [B, S].  attention_mask: [B, S], 0 at padding on either side; padding is taken out before
        anything sees it.  labels: [B, S], -100 where no loss is taken; shifted inside, as in transformers.
        prompt_lengths: [B], leading real tokens that the gates pool; None takes the leading run of -100 of the
        labels, or without labels the whole sequence. No loss is taken inside the prompt: its tokens are seen by
        the gate.  layout: forced routes, see `resolve_layout`.  gate_bias: added to every attention logit.
        routing: "soft" (Eq. 3, default in training), "straight_through", or "hard" (default otherwise).
        route_cost_weight: lambda of Eq. 4, None takes the config's.

        Raises ValueError for ids out of range, masks or labels of another shape, or a row without a token.
        """
        config = self.config
        mask = self._check_inputs(input_ids, attention_mask, labels)
        if labels is not None:
            labels = labels.masked_fill(~mask, -100)
        routing = routing or ("soft" if self.training else "hard")
        if routing not in ("soft", "straight_through", "hard"):
            raise ValueError(f"routing={routing!r} must be 'soft', 'straight_through' or 'hard'")
        lengths = mask.sum(1)
        cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        request, column = mask.nonzero(as_tuple=True)
        positions = (torch.arange(len(request), device=mask.device) - cu_seqlens[request]).to(torch.int32)
        prompts = _prompt_lengths(labels[mask] if labels is not None else None, request, positions, lengths)
        if prompt_lengths is not None:
            prompts = prompt_lengths.to(lengths).minimum(lengths)
        seqs = _Sequences(
            lengths=lengths.tolist(),
            cu_seqlens=cu_seqlens,
            positions=positions,
            request=request,
            prompt_lengths=prompts.clamp(min=1),
            cos_sin=rope_table(config, input_ids.shape[1], input_ids.device),
            gate_bias=lengths.new_zeros(len(lengths), dtype=torch.float32) + gate_bias,
        )
        forced = resolve_layout(layout, config, len(lengths))

        h = self.embed_tokens(input_ids[mask])
        all_probs, all_routes = [], []
        for i, layer in enumerate(self.layers):
            h, probs, routes = layer(h, seqs, None if forced is None else forced[:, i].to(h.device), routing)
            all_probs.append(probs)
            all_routes.append(routes)
        packed_logits = self.lm_head(self.norm(h))
        gate_probs = torch.stack(all_probs, 1)

        loss = lm_loss = None
        costs = gate_probs.new_tensor([config.attention_cost, config.ssm_cost])
        route_cost = (gate_probs @ costs).mean()
        if labels is not None:
            lm_loss = _next_token_loss(packed_logits, labels[mask], request, positions, seqs.prompt_lengths)
            weight = config.route_cost_weight if route_cost_weight is None else route_cost_weight
            loss = lm_loss + weight * route_cost
        logits = packed_logits.new_zeros(*input_ids.shape, config.vocab_size)
        logits = logits.index_put((request, column), packed_logits)
        output = FlexHybridOutput(
            loss=loss,
            logits=logits,
            lm_loss=lm_loss,
            route_cost=route_cost,
            gate_probs=gate_probs,
            layouts=torch.stack(all_routes, 1),
        )
        return output if return_dict is not False else output.to_tuple()

    def _check_inputs(self, input_ids: Tensor, attention_mask: Tensor | None, labels: Tensor | None) -> Tensor:
        """The boolean mask of real tokens, once the inputs are known to be sound."""
        if input_ids.dim() != 2 or not input_ids.numel():
            raise ValueError(f"input_ids must be [batch, tokens] with at least one token, got {list(input_ids.shape)}")
        for name, tensor in (("attention_mask", attention_mask), ("labels", labels)):
            if tensor is not None and tensor.shape != input_ids.shape:
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)}, not that of input_ids {list(input_ids.shape)}"
                )
        mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        if not mask.any(1).all():
            row = int((~mask.any(1)).nonzero()[0])
            raise ValueError(f"row {row} of attention_mask has no token: remove the row or give it one")
        low, high = input_ids[mask].aminmax()
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(
                f"input_ids must lie in [0, {self.config.vocab_size}), got {int(low)}..{int(high)}: "
                "use the tokenizer that belongs to the model"
            )
        return mask

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate` for left-padded batches, run by the engine; hard routes, whatever `training` says.

        Takes transformers' arguments, and `layout` (one for all prompts, or a list with one per prompt; see
        `resolve_layout`) and `gate_bias` (a number, or one per prompt, added to every attention logit). The routes
        taken are in `last_layouts`, int32 [B, num_layers], and in the output of `return_dict_in_generate=True`.

        Raises ValueError for bad input and for what is not supported (beam search, assisted decoding, ...), before any
        work.
        """
        generation = _generation()
        generation.check_arguments(args, kwargs)
        if isinstance(kwargs.get("gate_bias"), Tensor):  # transformers would repeat a tensor for num_return_sequences
            kwargs["gate_bias"] = kwargs["gate_bias"].tolist()
        return super().generate(*args, **kwargs)

    def _prepare_generation_config(self, *args: Any, **kwargs: Any) -> Any:
        config, model_kwargs = super()._prepare_generation_config(*args, **kwargs)
        _generation().check_config(config)
        return config, model_kwargs

    def _prepare_cache_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """The engine keeps its own pages; transformers need not make a cache."""

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        return _generation().sample(self, *args, **kwargs)


def _generation() -> ModuleType:
    # the one import against the order of the layers: generation knows the runtime, the model must not
    from .. import generation

    return generation


def _prompt_lengths(labels: Tensor | None, request: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
    """The leading run of -100 of each sequence's packed labels; all of it where there are no labels."""
    if labels is None:
        return lengths
    first = torch.where(labels != -100, positions.long(), lengths[request])
    return lengths.scatter_reduce(0, request, first, "amin")


def _next_token_loss(
    logits: Tensor, labels: Tensor, request: Tensor, positions: Tensor, prompt_lengths: Tensor
) -> Tensor:
    """Mean cross-entropy of predicting each labelled token behind its prompt from the row before it."""
    target = labels.masked_fill(positions < prompt_lengths[request], -100)
    target = torch.where(F.pad(request[1:] == request[:-1], (0, 1)), target.roll(-1), -100)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target, ignore_index=-100)


AutoConfig.register(FlexHybridConfig.model_type, FlexHybridConfig)
AutoModelForCausalLM.register(FlexHybridConfig, FlexHybridModel)
