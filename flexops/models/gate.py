"""The prefill gate: one choice between attention and SSM per request and layer, from the whole prompt (§4.1)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels as fk
from ..config import FlexHybridConfig


class PrefillGate(nn.Module):
    """A two-layer net on the mean of the prompt's layer inputs: logits = W2 silu(mean_t(W1 u_t) + b1) + b2.

    The mean commutes with W1, so a token contributes `gate_dim` fp32 numbers z_t = W1 u_t, and the gate of any
    prefix is a sum of rows. Generated tokens never enter.
    """

    def __init__(self, config: FlexHybridConfig) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(config.gate_dim, config.hidden_size))
        self.b1 = nn.Parameter(torch.zeros(config.gate_dim))
        self.w2 = nn.Parameter(torch.empty(2, config.gate_dim))
        self.b2 = nn.Parameter(torch.zeros(2))

    def forward(
        self, u: Tensor, cu_seqlens: Tensor, prompt_lengths: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Route probabilities and choices of packed sequences.

        u: [T, hidden_size] layer inputs.  cu_seqlens: int32 [R+1].  prompt_lengths: [R], the leading tokens of each
        sequence that the gate may see, at least 1.  bias: [R], added to the attention logit, or None.
        Returns probabilities [R, 2] (attention, ssm) fp32 and routes int32 [R].
        """
        starts = cu_seqlens[:-1].long()
        lengths = prompt_lengths.long()
        request = torch.repeat_interleave(torch.arange(len(lengths), device=u.device), cu_seqlens.diff().long())
        offset = torch.arange(u.shape[0], device=u.device) - starts[request]
        in_prompt = offset < lengths[request]
        wide = torch.promote_types(u.dtype, torch.float32)
        w1, b1, w2, b2 = (p.to(wide) for p in (self.w1, self.b1, self.w2, self.b2))
        bias = None if bias is None else bias.to(wide)
        z = u[in_prompt].to(wide) @ w1.T
        if not torch.is_grad_enabled():
            prompt_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
            return fk.gate_route(z, prompt_seqlens, b1, w2, b2, bias)
        pooled = z.new_zeros(len(lengths), z.shape[1]).index_add(0, request[in_prompt], z) / lengths.unsqueeze(-1)
        logits = F.silu(pooled + b1) @ w2.T + b2
        if bias is not None:
            logits = logits + torch.stack([bias, torch.zeros_like(bias)], dim=-1)
        return logits.softmax(-1), torch.where(logits[:, 0] > logits[:, 1], fk.ATTENTION, fk.SSM).to(torch.int32)
