"""What the context cache counts."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np


@dataclass
class CacheStats:
    """Counters since the engine was made. Token-layers are tokens times layers."""

    lookups: int = 0
    hits: int = 0
    looked_up_token_layers: int = 0
    computed_token_layers: int = 0  # of those looked up: what passed a layer, or its mixer alone
    replayed_token_layers: int = 0  # of those computed: below the end of the matched prefix
    repeated_token_layers: int = 0  # what passed a layer once more, for the layers above
    cached_tokens: int = 0
    evictions: Counter[str] = field(default_factory=Counter)  # by kind

    def count(self, lowest: np.ndarray, num_tokens: int, matched: int, passed: int, hit: bool) -> None:
        """One prompt.

        lowest: int64 [num_layers], the first row that passed each layer.  matched: tokens found in the tree.
        passed: rows that passed a layer, each time counted.  hit: whether any layer started from the cache.
        """
        looked_up, saved = num_tokens * len(lowest), int(lowest.sum())
        self.lookups += 1
        self.hits += hit
        self.looked_up_token_layers += looked_up
        self.computed_token_layers += looked_up - saved
        self.replayed_token_layers += int(np.maximum(matched - lowest, 0).sum())
        self.repeated_token_layers += passed - (looked_up - saved)
        self.cached_tokens += int(lowest.min())

    def as_dict(self) -> dict[str, object]:
        looked_up = self.looked_up_token_layers
        saved = looked_up - self.computed_token_layers
        return {
            "cache_lookups": self.lookups,
            "cache_hits": self.hits,
            "cache_looked_up_token_layers": looked_up,
            "cache_saved_token_layers": saved,
            "cache_replayed_token_layers": self.replayed_token_layers,
            "cache_repeated_token_layers": self.repeated_token_layers,
            "cached_tokens": self.cached_tokens,
            "cache_hit_rate": saved / looked_up if looked_up else None,
            "cache_evictions": dict(self.evictions),
        }
