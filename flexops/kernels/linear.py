"""Linear layers of the engine: weights packed once, and rows that do not depend on their neighbours.

Three forms: our own products (`cpu_linear.py`) where the processor is one they are written for, else oneDNN's, else
`F.linear`. oneDNN's packed operators have private names in torch; this file alone knows them, looks for them once, and
uses `F.linear` where they are missing, off the CPU, or refuse the dtype on this machine.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexops.kernels import cpu_linear

_pack_weight: Any = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_packed_linear: Any = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)

ROWS_TO_TRY = (1, 2, 3, 5, 8, 17, 33)


def _onednn(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's blocked form, or None where torch cannot pack it or not multiply with it."""
    if weight.device.type != "cpu" or _pack_weight is None or _packed_linear is None:
        return None
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        packed = _pack_weight(weight.contiguous())
        _packed_linear(weight.new_zeros(2, weight.shape[1]), packed, None, "none", [], "")
    except (RuntimeError, NotImplementedError):  # a dtype that oneDNN lacks on this processor
        return None
    return packed


class PackedLinear:
    """y = x W^T + b with W packed once; inference only.

    On the CPU a packed weight is read two to four times as fast as `F.linear` reads its own for a few rows, and the
    bits of a row depend neither on the number nor on the order of the rows (`verify_row_exactness` checks it). In
    oneDNN one row alone takes another path, so it is computed as two.

    in_features, out_features, dtype: of the joined weight.  form: "own", "onednn" or "plain", which is `F.linear`.
    """

    def __init__(self, weights: Tensor | Sequence[Tensor], bias: Tensor | None = None) -> None:
        """Join and pack the weights of layers that read the same input.

        weights: [out_i, in] each, joined along the outputs in the order given; not kept where packing works, not
        tracked by autograd: later changes of a packed weight are not seen.
        bias: [sum of out_i] or None.
        Raises ValueError for a bias of another shape.
        """
        parts = [weights] if isinstance(weights, Tensor) else list(weights)
        joined = parts[0].detach() if len(parts) == 1 else torch.cat([w.detach() for w in parts])
        self.out_features, self.in_features = joined.shape
        self.dtype = joined.dtype
        self.device = joined.device
        if bias is not None and bias.shape != (self.out_features,):
            raise ValueError(f"bias has shape {tuple(bias.shape)}; it must be ({self.out_features},), one per output")
        self._bias = None if bias is None else bias.detach().to(self.dtype).contiguous()
        if cpu_linear.supports(joined):
            self.form, self._weight = "own", cpu_linear.pack(joined)
        elif (packed := _onednn(joined)) is not None:
            self.form, self._weight = "onednn", packed
        else:
            self.form, self._weight = "plain", joined

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The product for some rows.

        x: [T, in] in the dtype of the weights, rows may be strided.
        out: [T, out_features] in the same dtype, contiguous, written; None makes it.
        Returns out. Raises ValueError for another shape, dtype or device.
        """
        if x.dim() != 2 or x.shape[1] != self.in_features or x.dtype != self.dtype:
            raise ValueError(
                f"x is {x.dtype} of shape {tuple(x.shape)}; it must be {self.dtype}, [rows, {self.in_features}]"
            )
        if out is not None:
            self._check_given(out, x)
        if self.form == "own":
            x = x if x.stride(1) == 1 else x.contiguous()
            return cpu_linear.linear(x, self._weight, self.out_features, self._bias, out)
        if x.shape[0] == 0:
            return x.new_empty(0, self.out_features) if out is None else out
        if self.form == "plain":
            return self._plain(x, out)
        product = self._multiply(torch.cat((x, x)))[:1] if x.shape[0] == 1 else self._multiply(x)
        return product if out is None else out.copy_(product)

    def _check_given(self, out: Tensor, x: Tensor) -> None:
        shape = (x.shape[0], self.out_features)
        if out.shape != shape or out.dtype != self.dtype or out.device != x.device or not out.is_contiguous():
            raise ValueError(
                f"out is {out.dtype} of shape {tuple(out.shape)}, strides {out.stride()}, on {out.device}; it must be "
                f"{self.dtype} of shape {shape}, contiguous, on {x.device}, or None"
            )

    def _plain(self, x: Tensor, out: Tensor | None) -> Tensor:
        if out is None:
            return F.linear(x, self._weight, self._bias)
        if self._bias is None:
            return torch.mm(x, self._weight.t(), out=out)
        return torch.addmm(self._bias, x, self._weight.t(), out=out)

    def _multiply(self, x: Tensor) -> Tensor:
        return _packed_linear(x, self._weight, self._bias, "none", [], "")


def verify_row_exactness(linear: PackedLinear, rows: Sequence[int] = ROWS_TO_TRY) -> bool:
    """Whether rows of this layer keep their bits in every batch: batches of `rows` rows against one large batch."""
    generator = torch.Generator().manual_seed(0)
    count = 2 * max(rows)
    x = torch.randn(count, linear.in_features, generator=generator).to(linear.dtype).to(linear.device)
    whole = linear(x)
    order = torch.randperm(count, generator=generator).to(linear.device)
    if not torch.equal(linear(x[order]), whole[order]):
        return False
    return all(
        torch.equal(linear(x[:n]), whole[:n]) and torch.equal(linear(x[count - n :]), whole[count - n :]) for n in rows
    )


def rows_are_exact(dtype: torch.dtype, in_features: int = 1536, out_features: int = 192) -> bool:
    """Start-up check of the linear algebra in use: `verify_row_exactness` of a layer of this size and dtype.

    The default has more inputs than oneDNN sums in one block, the case in which libraries differ between row counts.
    """
    weight = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(1))
    return verify_row_exactness(PackedLinear(weight.to(dtype)))
