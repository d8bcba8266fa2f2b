"""The least time that a step takes, as it is told before the first one."""

import pytest
import torch

from thinwire.train import check, pace
from thinwire.train.arguments import read_arguments
from thinwire.train.config import Config
from thinwire.train.model import Gpt

FIRST, CHANGE = 2144, 1120  # bytes of 2,048 values in int8 and int4


def config(*words: str) -> Config:
    small = ["--model.dim=32", "--model.context=64", "--forward=delta(int4)", "--train.batch=8"]
    if not any(word.startswith("--backward") for word in words):
        small.append("--backward=int4")
    return check.resolved(read_arguments([*small, "--link.rate=8mbit", *words]))


@pytest.mark.parametrize(
    ("words", "room", "nbytes"),
    [
        (("--backward=int8",), 1.0, FIRST),  # the slower direction
        ((), 1.0, CHANGE),
        ((), 0.5, (FIRST + CHANGE) / 2),
        (("--backward=int2", "--forward=bf16"), 1.0, 4096),
        (
            ("--nproc=4", "--backward=int8"),
            1.0,
            FIRST + CHANGE,
        ),  # a middle rank sends to both sides
        (("--train.frozen=2",), 1.0, CHANGE),  # and no gradients come back
        (("--link.transport=memory", "--pipeline.stages=4"), 1.0, 2 * CHANGE),
        (("--link.rate=none",), 1.0, 0),
        (("--forward=off", "--backward=off"), 1.0, 0),
    ],
)
def test_the_link_takes_as_long_as_the_busiest_direction_of_a_host(words, room, nbytes):
    made = config(*words)
    assert pace.link_s(made, Gpt(made), room) == pytest.approx(8 * 8 * nbytes / 8e6)


@pytest.mark.parametrize(
    ("words", "crossings"),
    [
        (("--pipeline.schedule=GPipe",), 4),
        ((), 8),
        (("--pipeline.stages=4",), 16),  # estimated as 20, which may be a fifth too many
        (("--train.frozen=2",), 1),
        (("--link.transport=memory", "--pipeline.stages=1"), 0),
    ],
)
def test_a_step_waits_for_the_latencies_of_its_schedule(words, crossings):
    made = config("--link.latency=50ms", *words)
    found = pace.latency_s(made, Gpt(made))
    assert found == pytest.approx(0.05 * crossings)


def test_frozen_blocks_are_timed_without_a_backward(monkeypatch):
    made = config("--train.frozen=2", "--pipeline.microbatches=4")
    model = Gpt(made)
    stages = model.stages(range(2))
    for stage in stages:
        stage.requires_grad_(True)
    monkeypatch.setattr(pace, "_timed", lambda *_: 0.01)
    assert pace.compute_s(made, model, stages, torch.device("cpu")) == pytest.approx(4 * 0.06)
    stages[0].requires_grad_(False)
    assert pace.compute_s(made, model, stages, torch.device("cpu")) == pytest.approx(4 * 0.04)


def test_a_step_takes_the_longest_of_its_parts(monkeypatch):
    made = config("--backward=int4")
    for longest in range(3):
        for k, name in enumerate(("compute_s", "link_s", "latency_s")):
            monkeypatch.setattr(pace, name, lambda *_, s=3.0 if k == longest else 1.0: s)
        assert pace.least_step_s(made, Gpt(made), 1.0, [], torch.device("cpu")) == 3.0
