"""A fine-tuning loop that survives its end: run it again, and it goes on where it stopped.

    torchrun --nproc-per-node 2 examples/finetune.py --out run --epochs 4

Each rank keeps weights, optimizer state and the links' references in ``run/rank-<r>``, on its own
disk. Ctrl-C finishes the step and saves.
"""

import argparse
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

import thinwire as tw

SAMPLES, BATCH, PARTS, LENGTH, DIM, WORDS = 64, 16, 4, 32, 64, 100

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("--out", type=Path, default=Path("run"))
options.add_argument("--epochs", type=int, default=4)
options.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
arguments = options.parse_args()

dist.init_process_group("gloo")  # torchrun sets rank and world size
rank, ranks = dist.get_rank(), dist.get_world_size()
own = arguments.out / f"rank-{rank}"
own.mkdir(parents=True, exist_ok=True)
torch.manual_seed(0)

# data: ids name the samples; here each is a sequence that its id determines
tokens = torch.randint(WORDS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def batch_of(step: int) -> torch.Tensor:
    """The ids of a step: each epoch shuffles anew."""
    epoch, at = divmod(step, SAMPLES // BATCH)
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
    return order[at * BATCH : (at + 1) * BATCH]


# this rank's stage of the model, and what goes in and comes out of it (meta tensors say enough)
layers: list[nn.Module] = [nn.Embedding(WORDS, DIM)] if rank == 0 else []
layers += [nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, dropout=0.0, batch_first=True)]
layers += [nn.Linear(DIM, WORDS)] if rank == ranks - 1 else []
model = nn.Sequential(*layers)
hidden = torch.empty(BATCH // PARTS, LENGTH, DIM, device="meta", requires_grad=True)
first = torch.empty(BATCH // PARTS, LENGTH, dtype=torch.int64, device="meta")
last = torch.empty(BATCH // PARTS, LENGTH, WORDS, device="meta", requires_grad=True)
stage = tw.PipelineStage(
    model,
    rank,
    ranks,
    "cpu",
    input_args=first if rank == 0 else hidden,
    output_args=last if rank == ranks - 1 else hidden,
)
schedule = tw.build_schedule("1F1B", [stage], PARTS, tw.TokenLoss())
pipeline = tw.Pipeline(
    schedule,
    [stage],
    tw.Plan("delta(int4)", "int4"),
    max_grad_norm=1.0,
    references=tw.Storage(ram=1 << 30, folder=own / "references"),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # one with state is saved with it
signal.signal(signal.SIGINT, lambda *_: pipeline.ask_to_stop())


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def state_in(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return state


def save(step: int) -> None:
    """Write this rank's part; once all have theirs it counts. The one before is kept as well."""
    folder = own / f"step-{step}"
    state = pipeline.checkpoint(folder)
    save_file(model.state_dict(), folder / "model.safetensors")
    (folder / "state.json").write_text(json.dumps(state))
    dist.barrier()  # all ranks have written it
    (own / "last").write_text(str(step))
    for old in sorted(own.glob("step-*"), key=step_of)[:-2]:
        pipeline.release(old)
        shutil.rmtree(old)


def resume() -> int:
    """Go on from the last step that every rank has; returns it, 0 for a new run."""
    mine = int((own / "last").read_text()) if (own / "last").exists() else 0
    found = torch.tensor(mine)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    step = int(found)
    if step:
        folder = own / f"step-{step}"
        model.load_state_dict(load_file(folder / "model.safetensors"))
        for line in pipeline.restore(folder, state_in(folder)):
            print(f"rank {rank}: {line}")
        for other in own.glob("step-*"):
            if step_of(other) < step:  # what it needs is left alone until it is released
                pipeline.hold(other, state_in(other))
    return step


steps = arguments.epochs * (SAMPLES // BATCH)
done = resume()
for step in range(done + 1, steps + 1):
    ids = batch_of(step - 1)
    inputs, target = tokens[ids, :-1], tokens[ids, 1:]
    result = pipeline.step(
        *([inputs] if rank == 0 else []),
        target=target,
        sample_ids=ids,
        next_sample_ids=batch_of(step) if step < steps else None,
    )
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}/{steps}  loss {result.loss:.6f}", flush=True)
    if step % arguments.every == 0 or step == steps or result.stop:
        save(step)
    if result.stop:
        break
pipeline.close()
dist.destroy_process_group()
