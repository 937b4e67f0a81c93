"""Hit rates of engines that compute nothing are those of real ones."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

from context_cache import cache_config, cache_room, draw, make_model, serve
from uncomputed import uncomputed_engine

from flexops.runtime import Engine


@pytest.mark.parametrize("kind", ["hybrid", "conventional"])
def test_what_is_kept_does_not_depend_on_rows(kind: str) -> None:
    model = make_model(hidden_size=64)
    prompts, layouts = draw(model, articles=5, number=0)
    config = cache_config(kind, cache_room(model) // 4)
    seen = []
    for engine in (Engine(model, config), uncomputed_engine(model, config)):
        serve(engine, prompts[:60], layouts[:60])
        stats = engine.stats()
        seen.append({name: value for name, value in stats.items() if "cache" in name and "seconds" not in name})
    assert seen[0] == seen[1]
    assert seen[0]["cache_hit_rate"] > 0.03 and sum(seen[0]["cache_evictions"].values()) > 100
