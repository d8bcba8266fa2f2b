"""Residual networks and their stages."""

from __future__ import annotations

import pytest
import torch

from thinwire.train import check
from thinwire.train.config import Config, build
from thinwire.train.stage import Stage
from thinwire.train.vision.resnet import ResNet


def config(kind: str, stages: int = 1, **more: object) -> Config:
    given = {"model.kind": kind, "data.path": "images", "pipeline.stages": stages, "nproc": stages}
    return check.resolved(build({**given, **more}))


def network(kind: str, stages: int = 1, channels: int = 1, size: int = 8, **more: object) -> ResNet:
    return ResNet(config(kind, stages, **more), (channels, size, size), 10)


def parts(made: ResNet) -> list[Stage]:
    return made.stages(range(made.config.num_stages))


@pytest.mark.parametrize(
    ("kind", "channels", "parameters"),
    [
        ("resnet8", 1, 77_754),
        ("resnet8", 3, 78_042),
        ("resnet10", 1, 308_538),
        ("resnet20", 1, 272_186),
        ("resnet20", 3, 272_474),
        ("resnet18", 3, 11_173_962),
    ],
)
def test_the_networks_are_as_large_as_those_of_the_literature(
    kind: str, channels: int, parameters: int
) -> None:
    assert network(kind, channels=channels).parameters == parameters
    assert network(kind, 2, channels=channels).parameters == parameters


@pytest.mark.parametrize("number", [2, 4])
def test_a_network_in_stages_starts_as_the_whole_and_computes_what_it_does(number: int) -> None:
    whole = network("resnet20", size=9)
    cut = network("resnet20", number, size=9)
    expected = whole.named_tensors(parts(whole))
    found = cut.named_tensors(parts(cut))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    images = torch.rand(3, 1, 9, 9)
    (one,), x = parts(whole), images
    for stage in parts(cut):
        x = stage(x)
    assert torch.equal(x, one(images))


def test_another_seed_gives_other_weights_and_each_parameter_its_own() -> None:
    one, other = (
        made.named_tensors(parts(made))
        for made in (network("resnet8"), network("resnet8", **{"train.seed": 1}))
    )
    assert not torch.equal(one["conv1.weight"], other["conv1.weight"])
    twins = [one[f"layer{k}.0.conv2.weight"].flatten()[:9] for k in (1, 2)]
    assert not torch.equal(*twins)
    assert one["bn1.running_var"].eq(1).all()


def test_building_a_stage_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    parts(network("resnet8", 2))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("size", [1, 7, 28])
def test_boundaries_are_declared_as_they_are_and_leave_a_relu(size: int) -> None:
    made = network("resnet8", 3, channels=2, size=size)
    x = torch.randn(2, 2, size, size)
    for index, stage in enumerate(parts(made)):
        declared_in, declared_out = made.arguments(index, 3, 2)
        assert declared_in.shape == x.shape
        x = stage(x)
        assert declared_out.shape == x.shape
        assert declared_in.requires_grad == (index > 0)
        assert declared_out.requires_grad
        if index < 2:
            assert x.ge(0).all()
            assert x.eq(0).any()


@pytest.mark.parametrize("frozen", [1, 2, 3])
def test_frozen_blocks_neither_learn_nor_move_their_statistics(frozen: int) -> None:
    made = network("resnet8", 3, **{"train.frozen": frozen})
    stages, x = parts(made), torch.rand(4, 1, 8, 8)
    before = {name: t.clone() for name, t in made.named_tensors(stages).items()}
    for stage in stages:
        x = stage(x)
    x.sum().backward()
    for name, tensor in made.named_tensors(stages).items():
        block = int(name[5]) if name.startswith("layer") else 0 if "1." in name else 4
        is_frozen = block <= frozen
        if isinstance(tensor, torch.nn.Parameter):
            assert (tensor.grad is None) == is_frozen, name
        elif "running" in name:
            assert torch.equal(tensor, before[name]) == is_frozen, name
    for edge in (0, 1):
        assert made.has_gradients(edge) == (edge + 1 > frozen)
