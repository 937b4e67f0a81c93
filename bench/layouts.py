"""Layouts drawn as the paper's Fig. 13 found them: 35 distinct ones, of which six cover 90% of the requests.

The figure also shows how the routes lie: on one dataset attention becomes more frequent with depth, on the others it
peaks in the middle. `rising=True` draws the former, so that layouts share their first routes as the paper's do; the
flat draw, where two layouts part at the first layer half of the time, is the harder case for a cache.
"""

import math
import random

NUM_LAYOUTS = 35
FREQUENT, FREQUENT_SHARE = 6, 0.9
STEEPNESS = 10.0  # of the rise with depth: a tenth of the routes are attention at 0.28 of the depth, nine at 0.72


def draw_layouts(num_layers: int, count: int, seed: int = 0, rising: bool = False) -> list[list[str]]:
    """count layouts of num_layers routes, drawn from 35 random ones.

    About half of the routes are attention: at every layer, or (rising) hardly any at the first and nearly all at the
    last.
    """
    rng = random.Random(seed)
    distinct: list[list[str]] = []
    while len(distinct) < min(NUM_LAYOUTS, 2**num_layers):
        depths = [(i + 0.5) / num_layers for i in range(num_layers)]
        shares = [1 / (1 + math.exp(-STEEPNESS * (depth - 0.5))) if rising else 0.5 for depth in depths]
        layout = ["attention" if rng.random() < share else "ssm" for share in shares]
        if layout not in distinct:
            distinct.append(layout)
    tail = len(distinct) - FREQUENT
    weights = [FREQUENT_SHARE / FREQUENT] * FREQUENT + [(1 - FREQUENT_SHARE) / tail] * tail
    return rng.choices(distinct, weights, k=count)
