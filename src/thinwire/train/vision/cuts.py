"""Where a network on images is cut into stages: after the ReLU at the end of a block."""

from __future__ import annotations

import functools

from thinwire.spec import nearest
from thinwire.train.config import Config, ConfigError
from thinwire.train.vision.architecture import BLOCKS, costs


def stops(config: Config) -> tuple[int, ...]:
    """How many blocks are before the end of each stage of a resolved configuration."""
    kind, named = config.model.kind, config.pipeline.cuts
    if named is not None:
        return (*parse(named, kind), len(BLOCKS[kind]))
    return even(tuple(costs(kind)), config.num_stages)


def parse(text: str, kind: str) -> tuple[int, ...]:
    """How many blocks are before each of the cuts that ``pipeline.cuts`` names."""
    after = {}
    for number, block in enumerate(BLOCKS[kind], start=1):
        after[block.name] = after[block.name.partition(".")[0]] = number
    found: list[int] = []
    for name in (part.strip() for part in text.split(",")):
        if name not in after:
            layers = [one for one in after if "." not in one]
            close = nearest(name, after if "." in name else layers) if name else ""
            raise ConfigError(
                f"--pipeline.cuts {text}: {kind} has no '{name}' to be cut after"
                f"{close or '; write as layer1,layer2.0'}"
            )
        if after[name] == len(BLOCKS[kind]):
            raise ConfigError(
                f"--pipeline.cuts {text}: behind '{name}' nothing is left of {kind} but its head; "
                "cut before it"
            )
        if found and after[name] <= found[-1]:
            raise ConfigError(
                f"--pipeline.cuts {text}: the cut after '{name}' is not behind the one before it; "
                "name them in order, each once"
            )
        found.append(after[name])
    return tuple(found)


@functools.cache
def even(costs: tuple[int, ...], stages: int) -> tuple[int, ...]:
    """The ends of ``stages`` runs of items, at least one each, of which the dearest is cheapest."""
    if stages == 1:
        return (len(costs),)
    best: tuple[int, tuple[int, ...]] | None = None
    for stop in range(stages - 1, len(costs)):
        before = even(costs[:stop], stages - 1)
        dearest = max(sum(costs[a:b]) for a, b in _spans((*before, len(costs))))
        if best is None or dearest < best[0]:
            best = dearest, (*before, len(costs))
    assert best is not None, "fewer items than stages"
    return best[1]


def _spans(ends: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip((0, *ends[:-1]), ends, strict=True))
