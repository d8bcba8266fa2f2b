"""A trainable boundary: an encoder ends one stage, a decoder begins the next, and both learn.

    python examples/bottleneck.py --steps 200

They are parts of the stages, so nothing has to be told about them: what crosses the link is what
the encoder gives, here a quarter of the residual stream, coded as any other tensor is. All stages
run in this process, over real schemes and frames; start it without torchrun. examples/finetune.py
has a process for each stage, and its stages may have such ends too.
"""

import argparse
import tempfile
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw

STAGES, PARTS, BATCH, LENGTH, DIM = 2, 4, 16, 64, 64

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("--steps", type=int, default=200)
arguments = options.parse_args()
scratch = tempfile.NamedTemporaryFile()  # noqa: SIM115  for this process alone
torch.set_num_threads(1)  # the matrices are small
dist.init_process_group("gloo", init_method=f"file://{scratch.name}", rank=0, world_size=1)

text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)


class Decoder(nn.Module):
    """From the narrow boundary back to the residual stream."""

    def __init__(self, narrow: int) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(narrow, DIM), nn.LayerNorm(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.up(x))
        return y


class Block(nn.TransformerEncoderLayer):
    """A causal transformer block."""

    def __init__(self) -> None:
        super().__init__(DIM, 4, 2 * DIM, dropout=0.0, batch_first=True, norm_first=True)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        y: torch.Tensor = super().forward(x, src_mask=self.mask, is_causal=True)
        return y


def train(width: int, plan: tw.Plan) -> tuple[float, float]:
    """Train with ``width`` values a token on the link; the last loss, and MB that were sent."""
    torch.manual_seed(0)
    encoder: list[nn.Module] = [] if width == DIM else [nn.Linear(DIM, width)]
    decoder: list[nn.Module] = [] if width == DIM else [Decoder(width)]
    modules = [
        nn.Sequential(nn.Embedding(256, DIM), Block(), *encoder),
        nn.Sequential(*decoder, Block(), nn.Linear(DIM, 256)),
    ]
    tokens = torch.empty(BATCH // PARTS, LENGTH, dtype=torch.int64, device="meta")
    narrow = torch.empty(BATCH // PARTS, LENGTH, width, device="meta", requires_grad=True)
    logits = torch.empty(BATCH // PARTS, LENGTH, 256, device="meta", requires_grad=True)
    boundaries = [tokens, narrow, logits]
    stages = [
        tw.PipelineStage(
            module,
            index,
            STAGES,
            input_args=boundaries[index],
            output_args=boundaries[index + 1],
        )
        for index, module in enumerate(modules)
    ]
    schedule = tw.build_schedule("Interleaved1F1B", stages, PARTS, tw.TokenLoss())
    pipeline = tw.Pipeline(
        schedule, stages, plan, transport=tw.MemoryTransport(), max_grad_norm=1.0
    )
    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=2e-3)
    for step in range(arguments.steps):
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=generator)
        chunk = text[starts[:, None] + torch.arange(LENGTH + 1)].long()
        result = pipeline.step(chunk[:, :-1], target=chunk[:, 1:])
        optimizer.step()
        optimizer.zero_grad()
    links = pipeline.link_reports()[:-1]  # the last one is what steps themselves take
    pipeline.close()
    return result.loss, sum(x["payload_bytes"] + x["header_bytes"] for x in links) / 1e6


for name, width, plan in [
    ("whole boundary, fp32", DIM, tw.Plan("raw", "raw")),
    ("whole boundary, int4 / int8", DIM, tw.Plan("int4", "int8")),
    ("a quarter of it, fp32", DIM // 4, tw.Plan("raw", "raw")),
    ("a quarter of it, int4 / int8", DIM // 4, tw.Plan("int4", "int8")),
]:
    loss, sent = train(width, plan)
    print(f"{name:30} loss {loss:.3f}  {sent:7.2f} MB sent", flush=True)
dist.destroy_process_group()
