"""Where networks are cut, and which settings make no cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.train import check
from thinwire.train.arguments import read_arguments
from thinwire.train.config import Config, ConfigError
from thinwire.train.vision import cuts


def resolved(*words: str) -> Config:
    given = ["--model.kind=resnet18", "--data.path=images", *words]
    return check.resolved(read_arguments(given))


@pytest.mark.parametrize(
    ("words", "stops", "nproc"),
    [
        (("--pipeline.cuts=layer1,layer2,layer3",), (2, 4, 6, 8), 4),
        (("--pipeline.cuts= layer1.0, layer4.0 ",), (1, 7, 8), 3),
        (("--pipeline.cuts=layer1.1",), (2, 8), 2),
        (("--pipeline.cuts=layer1,layer2,layer3", "--nproc=2"), (2, 4, 6, 8), 2),
        (("--pipeline.cuts=layer1,layer3", "--link.transport=memory"), (2, 6, 8), 1),
        (
            ("--pipeline.cuts=layer1,layer2,layer3", "--pipeline.schedule=ZBV"),
            (2, 4, 6, 8),
            2,
        ),
        (("--nproc=4",), (2, 4, 6, 8), 4),
        (("--pipeline.stages=2",), (4, 8), 2),
        (("--pipeline.stages=1", "--nproc=1"), (8,), 1),
        (("--model.kind=resnet8", "--nproc=3"), (1, 2, 3), 3),
    ],
)
def test_cuts_are_where_they_are_named_or_compute_is_even(
    words: tuple[str, ...], stops: tuple[int, ...], nproc: int
) -> None:
    made = resolved(*words)
    assert cuts.stops(made) == stops
    assert made.num_stages == len(stops)
    assert made.nproc == nproc


FAULTS = [
    (["--pipeline.cuts=layer5"], "resnet18 has no 'layer5' to be cut after; did you mean 'layer"),
    (["--pipeline.cuts=layer1.2"], "has no 'layer1.2' to be cut after; did you mean 'layer1."),
    (["--pipeline.cuts="], "has no '' to be cut after; write as layer1,layer2.0"),
    (["--pipeline.cuts=layer1,"], "has no '' to be cut after"),
    (["--pipeline.cuts=layer4"], "behind 'layer4' nothing is left of resnet18 but its head"),
    (["--pipeline.cuts=layer4.1"], "behind 'layer4.1' nothing is left"),
    (["--pipeline.cuts=layer2,layer1"], "the cut after 'layer1' is not behind the one before it"),
    (["--pipeline.cuts=layer1,layer1.1"], "the cut after 'layer1.1' is not behind"),
    (
        ["--pipeline.cuts=layer1", "--pipeline.stages=4"],
        "pipeline.cuts layer1 makes 2 stages, but pipeline.stages is 4; leave one of them out",
    ),
    (
        ["--pipeline.cuts=layer1,layer2", "--nproc=2"],
        "3 stages by pipeline.cuts on 2 processes with 1 a process doesn't come out even; set --np",
    ),
    (
        ["--pipeline.cuts=layer1,layer2", "--pipeline.schedule=1F1B", "--nproc=1"],
        "1F1B runs one stage a process",
    ),
    (["--nproc=9"], "9 stages but resnet18 has 8 blocks"),
    (["--model.kind=resnet8", "--nproc=4"], "4 stages but resnet8 has 3 blocks"),
]


@pytest.mark.parametrize(("words", "message"), FAULTS)
def test_cuts_that_contradict_the_network_or_other_settings_are_one_line(
    words: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(*words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@given(costs=st.lists(st.integers(1, 50), min_size=1, max_size=8), data=st.data())
def test_no_cuts_leave_a_cheaper_dearest_stage(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))

    def dearest(stops: tuple[int, ...]) -> int:
        return max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *stops)))

    found = cuts.even(tuple(costs), stages)
    every = itertools.combinations(range(1, len(costs)), stages - 1)
    assert dearest(found) == min(dearest((*inner, len(costs))) for inner in every)
