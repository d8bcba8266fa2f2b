"""The GPT and its stages."""

from __future__ import annotations

import pytest
import torch

from thinwire.train.config import Config, ModelConfig, PipelineConfig, TrainConfig
from thinwire.train.model import (
    Gpt,
    GptStage,
    build_stage,
    freeze,
    layers_of_stage,
    parameter_count,
    tie_local,
)

SMALL = ModelConfig(layers=4, dim=32, heads=4, context=16)


def stages(number: int, config: ModelConfig = SMALL, seed: int = 0) -> list[GptStage]:
    return [build_stage(config, index, number, seed) for index in range(number)]


def gpt(number: int, frozen: int = 0) -> Gpt:
    return Gpt(
        Config(
            model=SMALL,
            train=TrainConfig(frozen=frozen),
            pipeline=PipelineConfig(stages=number),
        )
    )


@pytest.mark.parametrize("number", [2, 3, 4])
def test_a_model_in_stages_starts_from_the_weights_of_the_whole(number: int) -> None:
    whole = dict(stages(1)[0].named_parameters())
    parts = {k: p for stage in stages(number) for k, p in stage.named_parameters()}
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


@pytest.mark.parametrize("number", [2, 3, 4])
def test_a_model_in_stages_computes_what_the_whole_does(number: int) -> None:
    tokens = torch.arange(32).view(2, 16)
    expected = stages(1)[0](tokens)
    x = tokens
    for stage in stages(number):
        x = stage(x)
    assert torch.equal(x, expected)


def test_another_seed_gives_other_weights_and_each_parameter_its_own() -> None:
    one = dict(stages(1)[0].named_parameters())
    other = dict(stages(1, seed=1)[0].named_parameters())
    assert not torch.equal(one["embedding.token.weight"], other["embedding.token.weight"])
    assert not torch.equal(one["blocks.0.qkv.weight"], one["blocks.1.qkv.weight"])


def test_building_a_stage_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    build_stage(SMALL, 0, 2, 0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("layers", [1, 4, 5, 7])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_layers_are_shared_out_evenly_and_in_order(layers: int, number: int) -> None:
    parts = [layers_of_stage(layers, index, number) for index in range(number)]
    assert [layer for part in parts for layer in part] == list(range(layers))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("index", [0, 1, 2])
def test_boundary_tensors_have_the_shapes_of_the_real_ones(index: int) -> None:
    x = torch.zeros(2, SMALL.context, dtype=torch.int64)
    parts = stages(3)
    for stage in parts[:index]:
        x = stage(x)
    declared_in, declared_out = gpt(3).arguments(index, 3, 2)
    out = parts[index](x)
    assert (declared_in.shape, declared_in.dtype) == (x.shape, x.dtype)
    assert (declared_out.shape, declared_out.dtype) == (out.shape, out.dtype)
    assert declared_out.requires_grad
    assert declared_in.requires_grad == (index > 0)


@pytest.mark.parametrize("frozen", range(5))
def test_stages_of_frozen_blocks_alone_need_no_gradient(frozen: int) -> None:
    for number in (1, 2, 4):
        parts = stages(number)
        for part in parts:
            freeze(part, frozen, tied=False)
        trained = [n for part in parts for n, p in part.named_parameters() if p.requires_grad]
        blocks = {int(n.split(".")[1]) for n in trained if n.startswith("blocks")}
        assert blocks == set(range(frozen, 4))
        assert ("embedding.token.weight" in trained) == (frozen == 0)
        for index, part in enumerate(parts[:-1]):
            whole = gpt(number, frozen)
            is_needed = whole.arguments(index, number, 2)[1].requires_grad
            assert is_needed == whole.arguments(index + 1, number, 2)[0].requires_grad
            learns = any(p.requires_grad for part in parts[: index + 1] for p in part.parameters())
            assert is_needed == learns


def test_a_tied_head_shares_the_embedding_in_one_process_and_equals_it_in_two() -> None:
    tied = ModelConfig(layers=2, dim=32, heads=4, context=16, tied=True)
    first, last = build_stage(tied, 0, 2, 0), build_stage(tied, 1, 2, 0)
    assert first.embedding is not None
    assert last.head is not None
    assert torch.equal(first.embedding.token.weight, last.head.output.weight)
    tie_local([first, last])
    assert first.embedding.token.weight is last.head.output.weight
    whole = build_stage(tied, 0, 1, 0)
    assert sum(p.numel() for p in whole.parameters()) == parameter_count(tied)


def test_the_default_model_has_about_0_86_million_parameters() -> None:
    assert 0.85e6 < parameter_count(ModelConfig()) < 0.89e6


def test_attention_looks_only_back() -> None:
    model = stages(1)[0]
    tokens = torch.arange(16).view(1, 16)
    changed = tokens.clone()
    changed[0, 10] = 99
    assert torch.equal(model(tokens)[0, :10], model(changed)[0, :10])
