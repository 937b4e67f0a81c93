"""Layouts: the route of every layer, as people write them and as tensors."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from .. import kernels as fk
from ..config import FlexHybridConfig

Layout = str | Sequence[str] | None

ROUTE_NAMES = {"attention": fk.ATTENTION, "ssm": fk.SSM, "adaptive": -1}


def layout_routes(layout: Layout, config: FlexHybridConfig) -> list[int]:
    """One request's layout as a code per layer: ATTENTION, SSM, or -1 where the gate decides.

    layout: None (adaptive), "attention" or "ssm" (every layer that has the choice), or one name per layer. Layers
    with a single branch always take it. Raises ValueError for other names, another number of layers, or a layer
    asked for a branch that it does not have.
    """
    fixed = [ROUTE_NAMES[name] for name in config.layer_routes]
    if layout is None or isinstance(layout, str):
        name = layout or "adaptive"
        if name not in ROUTE_NAMES:
            raise ValueError(f"layout={layout!r} must be None, 'attention', 'ssm', or a list with a route per layer")
        return [ROUTE_NAMES[name] if route < 0 else route for route in fixed]
    if len(layout) != len(fixed) or any(name not in ROUTE_NAMES for name in layout):
        raise ValueError(
            f"layout={list(layout)!r} must name 'attention', 'ssm' or 'adaptive' for each of the {len(fixed)} layers"
        )
    routes = [ROUTE_NAMES[name] for name in layout]
    for i, (route, only) in enumerate(zip(routes, fixed, strict=True)):
        if only >= 0 and route not in (-1, only):
            raise ValueError(f"layout[{i}]={layout[i]!r}, but layer {i} has only a branch {config.layer_routes[i]!r}")
    return [only if only >= 0 else route for route, only in zip(routes, fixed, strict=True)]


def resolve_layout(layout: Layout | list[Layout], config: FlexHybridConfig, num_requests: int) -> Tensor | None:
    """Layouts of a batch as int32 [num_requests, num_layers], None where every request is adaptive.

    layout: one for all, or a list with one per request (None, a name, or a list of names each).
    """
    if layout is None:
        return None
    # a flat list of names is one layout; a list that holds None or lists has one entry per request
    if isinstance(layout, str) or all(isinstance(item, str) for item in layout):
        layouts = [cast(Layout, layout)] * num_requests
    else:
        layouts = list(layout)
    if len(layouts) != num_requests:
        raise ValueError(f"layout has {len(layouts)} entries for {num_requests} requests")
    return torch.tensor([layout_routes(item, config) for item in layouts], dtype=torch.int32)


def layout_strip(routes: Sequence[int]) -> str:
    """A layout as a strip of one letter per layer: A attention, S ssm, ? not chosen yet."""
    return "".join({fk.ATTENTION: "A", fk.SSM: "S"}.get(route, "?") for route in routes)
