"""Layouts drawn as the paper's Fig. 13 found them: 35 distinct ones, of which six cover 90% of the requests."""

import random

NUM_LAYOUTS = 35
FREQUENT, FREQUENT_SHARE = 6, 0.9


def draw_layouts(num_layers: int, count: int, seed: int = 0) -> list[list[str]]:
    """count layouts of num_layers routes, drawn from 35 random ones; about half of the routes are attention."""
    rng = random.Random(seed)
    distinct: list[list[str]] = []
    while len(distinct) < min(NUM_LAYOUTS, 2**num_layers):
        layout = [rng.choice(("attention", "ssm")) for _ in range(num_layers)]
        if layout not in distinct:
            distinct.append(layout)
    tail = len(distinct) - FREQUENT
    weights = [FREQUENT_SHARE / FREQUENT] * FREQUENT + [(1 - FREQUENT_SHARE) / tail] * tail
    return rng.choices(distinct, weights, k=count)
