"""A small GPT over bytes, cut into pipeline stages by its list of blocks.

A parameter's first value depends on its global name and the seed alone, so that a model of one,
two or four stages starts from identical weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.train.config import Config, ModelConfig
from thinwire.train.data import VOCABULARY
from thinwire.train.stage import Stage, draw
from thinwire.train.task import Model


class Block(nn.Module):
    """Pre-norm transformer block: causal attention, then an MLP four times as wide."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.attention_norm = nn.LayerNorm(config.dim)
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.attention_out = nn.Linear(config.dim, config.dim)
        self.mlp_norm = nn.LayerNorm(config.dim)
        self.mlp_in = nn.Linear(config.dim, 4 * config.dim)
        self.mlp_out = nn.Linear(4 * config.dim, config.dim)

    def forward(self, x_btd: Tensor) -> Tensor:
        batch, tokens, dim = x_btd.shape
        qkv = self.qkv(self.attention_norm(x_btd))
        q, k, v = qkv.view(batch, tokens, 3 * self.heads, -1).transpose(1, 2).chunk(3, dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = self.attention_out(mixed.transpose(1, 2).reshape(batch, tokens, dim))
        x_btd = x_btd + functional.dropout(mixed, self.dropout, self.training)
        hidden = self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x_btd))))
        return x_btd + functional.dropout(hidden, self.dropout, self.training)


class Embedding(nn.Module):
    """Token plus learned position: int64 ``[batch, tokens]`` → ``[batch, tokens, dim]``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, config.dim)
        self.position = nn.Embedding(config.context, config.dim)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        positions = torch.arange(tokens_bt.shape[1], device=tokens_bt.device)
        embedded: Tensor = self.token(tokens_bt) + self.position(positions)
        return embedded


class Head(nn.Module):
    """Final norm and output projection: ``[batch, tokens, dim]`` → logits over the vocabulary."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.dim)
        self.output = nn.Linear(config.dim, VOCABULARY, bias=False)

    def forward(self, x_btd: Tensor) -> Tensor:
        logits: Tensor = self.output(self.norm(x_btd))
        return logits


class GptStage(Stage):
    """Consecutive blocks; the first stage also embeds, the last also has the head."""

    def __init__(self, config: ModelConfig, stage_index: int, num_stages: int) -> None:
        super().__init__(stage_index)
        self.embedding = Embedding(config) if stage_index == 0 else None
        layers = layers_of_stage(config.layers, stage_index, num_stages)
        self.blocks = nn.ModuleDict({str(layer): Block(config) for layer in layers})
        self.head = Head(config) if stage_index == num_stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def layers_of_stage(layers: int, stage_index: int, num_stages: int) -> range:
    """The global block numbers of a stage, balanced to within one."""
    return range(layers * stage_index // num_stages, layers * (stage_index + 1) // num_stages)


def build_stage(config: ModelConfig, stage_index: int, num_stages: int, seed: int) -> GptStage:
    """One stage with its initial weights, on the CPU, in fp32."""
    with torch.device("meta"):
        stage = GptStage(config, stage_index, num_stages)
    stage.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            _initialise(name, parameter, config, seed)
    if config.tied and stage.embedding is not None and stage.head is not None:
        stage.head.output.weight = stage.embedding.token.weight
    return stage


def freeze(stage: GptStage, frozen: int, tied: bool) -> None:
    """Leave the model's first ``frozen`` blocks as they are, with the embedding and, where that
    is the head's matrix too, with it."""
    if not frozen:
        return
    if stage.embedding is not None:
        stage.embedding.requires_grad_(False)
    for layer, block in stage.blocks.items():
        block.requires_grad_(int(layer) >= frozen)
    if stage.head is not None and tied:
        stage.head.output.requires_grad_(False)


def tie_local(stages: list[GptStage]) -> None:
    """Let an embedding and a head in the same process be one parameter."""
    embedding = next((s.embedding for s in stages if s.embedding is not None), None)
    head = next((s.head for s in stages if s.head is not None), None)
    if embedding is not None and head is not None:
        head.output.weight = embedding.token.weight


def tied_parameter(stages: Sequence[Stage]) -> nn.Parameter | None:
    """This process's copy of the weight that embedding and head share, if it has one."""
    for stage in stages:
        assert isinstance(stage, GptStage)
        weight = None
        if stage.embedding is not None:
            weight = stage.embedding.token.weight
        elif stage.head is not None:
            weight = stage.head.output.weight
        if isinstance(weight, nn.Parameter):
            return weight
    return None


def _initialise(name: str, parameter: nn.Parameter, config: ModelConfig, seed: int) -> None:
    """GPT-2's scales, drawn from a uniform distribution."""
    if name.endswith("norm.weight"):
        parameter.fill_(1.0)
    elif name.endswith("bias"):
        parameter.zero_()
    else:
        std = 0.02
        if name.endswith(("attention_out.weight", "mlp_out.weight")):
            std /= math.sqrt(2 * config.layers)
        if config.tied and name == "head.output.weight":
            name = "embedding.token.weight"
        draw(parameter, std * math.sqrt(3), seed, name)


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the whole model, a tied weight counted once."""
    with torch.device("meta"):
        total = sum(p.numel() for p in GptStage(config, 0, 1).parameters())
    return total - VOCABULARY * config.dim * config.tied


class Gpt(Model):
    """The GPT of a run, as every model is seen."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.draws = config.model.dropout > 0

    @property
    def parameters(self) -> int:
        return parameter_count(self.config.model)

    @property
    def frozen(self) -> str:
        return f"the embedding and {self.config.train.frozen} of {self.config.model.layers} blocks"

    def stages(self, indices: Sequence[int]) -> list[Stage]:
        config = self.config
        stages = [
            build_stage(config.model, index, config.num_stages, config.train.seed)
            for index in indices
        ]
        if config.model.tied:
            tie_local(stages)
        for stage in stages:
            freeze(stage, config.train.frozen, config.model.tied)
        return [*stages]

    def inputs(self, rows: int) -> Tensor:
        return torch.empty(rows, self.config.model.context, dtype=torch.int64, device="meta")

    def boundary(self, edge: int, rows: int) -> Tensor:
        model = self.config.model
        before = layers_of_stage(model.layers, edge, self.config.num_stages).stop
        learns = before > self.config.train.frozen
        return torch.empty(rows, model.context, model.dim, device="meta", requires_grad=learns)

    def outputs(self, rows: int) -> Tensor:
        shape = (rows, self.config.model.context, VOCABULARY)
        return torch.empty(shape, device="meta", requires_grad=True)

    def named_tensors(self, stages: Sequence[Stage]) -> dict[str, Tensor]:
        """A tied head's weight has the embedding's name, on every process that holds a copy."""
        found: dict[str, Tensor] = {}
        for stage in stages:
            for name, tensor in stage.state_dict(keep_vars=True).items():
                is_copy = self.config.model.tied and name == "head.output.weight"
                found["embedding.token.weight" if is_copy else name] = tensor
        return found

    def tied(self, stages: Sequence[Stage]) -> dict[str, nn.Parameter]:
        shared = tied_parameter(stages) if self.config.model.tied else None
        return {} if shared is None else {"embedding": shared}
