"""What is asked of a codec or scheme in a pipeline: that a small model trains over it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire as tw
from thinwire.codecs import Codec
from thinwire.contract.data import normal, steps
from thinwire.contract.ends import Ends, equal
from thinwire.contract.requirement import NotApplicable, need, on, requirement
from thinwire.schemes import Delta, Scheme

_VOCABULARY, _DIM, _POSITIONS, _ROWS = 11, 8, 6, 4
_STEPS, _MICROBATCHES = 3, 2
_SOME = 6


@requirement("delta", "both ends of delta hold the same references of it over all visits")
def delta(codec: Codec) -> str | None:
    for scheme in (Delta(codec, first=codec, ref="fp32"), Delta(codec)):
        ends = Ends(scheme)
        for number, step in enumerate(steps(2 * _SOME)):
            _, received = ends.step(step, shuffled=number)
            with on(f"step {number + 1} of {scheme}"):
                here, there = ends.digests
                need(here == there, f"digests {here:x} and {there:x}")
                finite = all(bool(torch.isfinite(y).all()) for y in received)
                need(finite, "values that are not finite")
    return None


@requirement("pipeline", "two stages train over it: finite losses, both learn, and ends that agree")
def of_codec(codec: Codec) -> str | None:
    return _train(str(codec))


@requirement("pipeline", "two stages train over it: finite losses, both learn, and ends that agree")
def of_scheme(scheme: Scheme) -> str | None:
    return _train(str(scheme))


def _train(spec: str) -> str | None:
    with _process_group():
        for forward, backward in ((spec, "raw"), ("raw", spec)):
            with on(f"forward {forward}, backward {backward}"):
                _train_with(tw.Plan(forward, backward))
    return None


@contextlib.contextmanager
def _process_group() -> Iterator[None]:
    """A process group of this process alone, which torch's stages ask for."""
    if dist.is_initialized():
        if dist.get_world_size() > 1:
            raise NotApplicable("this process belongs to a group of several")
        yield
        return
    log = logging.getLogger("torch.distributed.pipelining.schedules")
    level = log.level
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not exported
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        log.setLevel(logging.CRITICAL)  # on any error torch logs the whole schedule
        yield
    finally:
        log.setLevel(level)
        dist.destroy_process_group()


class _First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(_VOCABULARY, _DIM), nn.Linear(_DIM, _DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y: Tensor = x + torch.tanh(self.mix(x))
        return y


def _train_with(plan: tw.Plan) -> None:
    modules: list[nn.Module] = [_First(), nn.Linear(_DIM, _VOCABULARY)]
    with torch.no_grad():
        for number, parameter in enumerate(p for m in modules for p in m.parameters()):
            parameter.copy_(0.3 * normal(*parameter.shape, seed=number))
    before = [[p.detach().clone() for p in m.parameters()] for m in modules]
    pipeline = _pipeline(modules, plan)
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.5)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(_VOCABULARY, (_ROWS, _POSITIONS + 1), generator=generator)
    given, target = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    known = dict.fromkeys(pipeline.takes, given)
    for step in range(_STEPS):  # the last with a shorter row
        lengths = torch.tensor([_POSITIONS] * (_ROWS - 1) + [_POSITIONS - 2 * (step == _STEPS - 1)])
        valid = torch.arange(_POSITIONS) < lengths[:, None]
        wanted = target.masked_fill(~valid, -100)
        ids = torch.arange(_ROWS)
        result = pipeline.step(given, target=wanted, sample_ids=ids, lengths=lengths, context=known)
        need(bool(torch.isfinite(torch.tensor(result.loss))), f"a loss of {result.loss}")
        optimizer.step()
        optimizer.zero_grad()
    for codec in (True, False):
        loss = pipeline.eval(given, target=target, codec=codec, context=known).loss
        need(bool(torch.isfinite(torch.tensor(loss))), f"a loss of {loss} in evaluation")
    for number, (module, old) in enumerate(zip(modules, before, strict=True)):
        moved = any(not torch.equal(p, q) for p, q in zip(module.parameters(), old, strict=True))
        need(moved, f"stage {number} has not learned anything")
    _check_digests(pipeline.state_digests())
    pipeline.close()


def _pipeline(modules: list[nn.Module], plan: tw.Plan) -> tw.Pipeline:
    rows = _ROWS // _MICROBATCHES
    tokens = torch.empty(rows, _POSITIONS, dtype=torch.int64, device="meta")
    hidden = torch.empty(rows, _POSITIONS, _DIM, device="meta", requires_grad=True)
    logits = torch.empty(rows, _POSITIONS, _VOCABULARY, device="meta", requires_grad=True)
    shapes = [(tokens, hidden), (hidden, logits)]
    stages = [
        tw.PipelineStage(module, index, 2, "cpu", input_args=given, output_args=made)
        for index, (module, (given, made)) in enumerate(zip(modules, shapes, strict=True))
    ]
    schedule = tw.build_schedule("Interleaved1F1B", stages, _MICROBATCHES, tw.TokenLoss())
    return tw.Pipeline(schedule, stages, plan, transport=tw.MemoryTransport(), deadline=20.0)


def _check_digests(digests: dict[str, int]) -> None:
    ends: dict[str, list[int]] = {}
    for name, digest in digests.items():
        ends.setdefault(name.rpartition(" ")[0], []).append(digest)
    for name, found in ends.items():
        need(equal(found, found[:1] * 2), f"digests {found} of {name}")
