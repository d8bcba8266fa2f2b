"""How the ranks of a pipeline come together: what they compare, and the edges they build."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from thinwire.boundary import Boundary
from thinwire.counters import Timers
from thinwire.edge import EdgeEnd, LinkReceiver, LinkSender, Names
from thinwire.frame import Direction, Place
from thinwire.network import Transport
from thinwire.pipeline.control import Control
from thinwire.pipeline.engine import MOST_MICROBATCHES
from thinwire.pipeline.frozen import doubt
from thinwire.pipeline.plan import Plan
from thinwire.pipeline.stage import PipelineStage
from thinwire.schemes import Scheme

CHANNELS_A_LINK = MOST_MICROBATCHES


@dataclasses.dataclass(frozen=True)
class Tie:
    """A parameter that several ranks own; ``slot`` numbers it on all of them alike."""

    slot: int
    owners: list[int]
    parameter: nn.Parameter


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all ranks agreed on: the largest micro-batch, and this rank's tied parameters.

    ``doubts``: why each stage may compute something else at a sample's next visit, or None.
    ``outputs``: how many tensors each hands over.
    """

    max_rows: int
    ties: list[Tie]
    doubts: list[str | None]
    outputs: list[int]


def group_ranks(group: Any) -> list[int]:
    """The global ranks of a process group (None: the default group), in order."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def rank_names(rank_of: Mapping[int, int]) -> list[str]:
    """How an error names each rank, by its stages: ``stage 2 (rank 1)``."""
    names = []
    for rank in range(max(rank_of.values()) + 1):
        stages = [str(stage) for stage, owner in sorted(rank_of.items()) if owner == rank]
        what = "stage" if len(stages) == 1 else "stages"
        names.append(f"{what} {', '.join(stages)} (rank {rank})")
    return names


def compare(
    control: Control,
    stages: Sequence[PipelineStage],
    plan: Plan,
    settings: dict[str, Any],
    tied: Mapping[str, nn.Parameter],
) -> Setup:
    """Tell all ranks what this one was given, and agree on the run's number (collective).

    ``settings`` are JSON values that must be the same on all ranks.

    Marks the stages' boundary tensors with the dimensions that vary. Raises the same ValueError on
    every rank if they differ, or if stages do not fit together.
    """
    num_stages = stages[0].num_stages
    found = control.gather_setup(
        {
            "run": int.from_bytes(os.urandom(8), "little"),
            **settings,
            "plan": [plan.forward, plan.backward, sorted(plan.edges.items())],
            "stages": {
                str(s.stage_index): [_describe(s.inputs), _describe(s.outputs), doubt(s)]
                for s in stages
            },
            "tied": {
                name: [list(p.shape), p.requires_grad, _digest(p)] for name, p in tied.items()
            },
        }
    )
    control.run = found[0]["run"]
    by_stage = _check(found, num_stages, ["plan", *settings])
    first = by_stage[0][0][0]
    max_rows = first["shape"][0] if first["shape"] else 1
    max_len = _longest(first["shape"], first["dtype"])
    for stage in stages:
        stage.inputs = [_mark(b, max_rows, max_len) for b in stage.inputs]
        stage.outputs = [_mark(b, max_rows, max_len) for b in stage.outputs]
    told = [by_stage[index] for index in range(num_stages)]
    doubts, outputs = [doubt for _, _, doubt in told], [len(given) for _, given, _ in told]
    return Setup(max_rows, _ties(found, tied), doubts, outputs)


def _describe(boundaries: Sequence[Boundary]) -> list[dict[str, Any]]:
    return [
        {"shape": list(b.shape), "dtype": str(b.dtype), "requires_grad": b.requires_grad}
        for b in boundaries
    ]


def _digest(parameter: nn.Parameter) -> int:
    data = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)  # numpy has no bf16
    return xxhash.xxh3_64_intdigest(data.numpy().data)


def _check(found: list[dict[str, Any]], num_stages: int, same: list[str]) -> dict[int, Any]:
    """(inputs, outputs, doubt) by stage; ValueError where the ranks do not fit together."""
    for rank, other in enumerate(found):
        for key in same:
            if json.dumps(other[key]) != json.dumps(found[0][key]):
                raise ValueError(
                    f"rank {rank} has {key} {other[key]}, rank 0 {found[0][key]}: "
                    "all ranks need the same"
                )
    stages = {int(k): v for other in found for k, v in other["stages"].items()}
    for edge in (int(e) for e, _ in found[0]["plan"][2]):
        if not 0 <= edge < num_stages - 1:
            raise ValueError(f"the plan names edge {edge}; there are {num_stages - 1}, from 0")
    for index in range(num_stages):
        if index not in stages:
            raise ValueError(f"no rank holds stage {index} of {num_stages}")
    for edge in range(num_stages - 1):
        _check_edge(edge, stages[edge][1], stages[edge + 1][0])
    return stages


def _check_edge(edge: int, outputs: list[Any], inputs: list[Any]) -> None:
    """The outputs of one stage are the inputs of the next; float dtypes may differ."""
    where = f"stage {edge} to stage {edge + 1}"
    if len(outputs) != len(inputs):
        raise ValueError(
            f"{where}: output_args has {len(outputs)} tensors, input_args {len(inputs)}"
        )
    for index, (out, into) in enumerate(zip(outputs, inputs, strict=True)):
        for key in ("shape", "requires_grad"):
            if out[key] != into[key]:
                raise ValueError(
                    f"{where}, tensor {index}: output_args has {key} {out[key]}, "
                    f"input_args {into[key]}"
                )


def _longest(shape: Sequence[int], dtype: str) -> int | None:
    """The longest sequence, where the first stage's input is declared as [rows, positions, …].

    None where it has none: the second dimension of images [rows, channels, height, width] are
    their channels, whatever is as long somewhere behind them.
    """
    is_image = len(shape) >= 4 and getattr(torch, dtype.removeprefix("torch.")).is_floating_point
    return None if len(shape) < 2 or is_image else shape[1]


def _mark(boundary: Boundary, max_rows: int, max_len: int | None) -> Boundary:
    """Tell which dimensions of a boundary tensor vary with rows and sequence length.

    The second dimension of a float matrix is its features, whatever its size.
    """
    shape = boundary.shape
    wide = len(shape) >= (3 if boundary.dtype.is_floating_point else 2)
    return dataclasses.replace(
        boundary,
        batched=bool(shape) and shape[0] == max_rows,
        sequence=wide and shape[1] == max_len,
    )


def _ties(found: list[dict[str, Any]], tied: Mapping[str, nn.Parameter]) -> list[Tie]:
    ties = []
    for slot, name in enumerate(sorted({n for other in found for n in other["tied"]})):
        owners = [rank for rank, other in enumerate(found) if name in other["tied"]]
        copies = [found[rank]["tied"][name] for rank in owners]
        if any(copy != copies[0] for copy in copies):
            raise ValueError(f"the copies of tied parameter {name!r} are not equal")
        if name in tied and tied[name].requires_grad:
            ties.append(Tie(slot, owners, tied[name]))
    return ties


class Connector:
    """Builds the ends of a rank's edges over one transport."""

    def __init__(
        self,
        transport: Transport,
        plan: Plan,
        rank_of: Mapping[int, int],
        run: int,
        timers: Timers,
        window: int,
    ) -> None:
        self.transport, self.plan, self.rank_of = transport, plan, rank_of
        self.run, self.timers, self.window = run, timers, window

    def connect(self, stages: Sequence[PipelineStage]) -> list[EdgeEnd]:
        """Give each stage its edges to the neighbours that it reaches over the transport.

        A neighbour on the same rank is left to the schedule, unless all stages share one process.
        """
        ends: dict[tuple[int, int], EdgeEnd] = {}
        local = {s.stage_index for s in stages}
        for stage in stages:
            here = stage.stage_index
            for there in (here - 1, here + 1):
                if not 0 <= there < stage.num_stages:
                    continue
                schemes = self.plan.schemes(min(here, there))
                if schemes is None or (there in local and not self.transport.in_process):
                    continue
                ends[here, there] = end = self._end(stage, there, schemes)
                if there < here:
                    stage.previous = end
                else:
                    stage.next = end
        if self.transport.in_process:
            for (here, there), end in ends.items():
                end.peer = ends[there, here]
        return list(ends.values())

    def address(self, stage: int) -> int:
        """Where a stage is reached."""
        return stage if self.transport.in_process else self.rank_of[stage]

    def _end(self, stage: PipelineStage, there: int, schemes: tuple[Scheme, Scheme]) -> EdgeEnd:
        here = stage.stage_index
        edge = min(here, there)
        downstream = there > here
        names = Names(self._name(here), self._name(there))
        boundaries = stage.outputs if downstream else stage.inputs
        transport = self.transport.endpoint(self.address(here))

        def link(kind: type[Any], direction: Direction) -> Any:
            return kind(
                transport,
                self.address(there),
                Place(self.run, 0, 0, edge, direction),
                (1 + 2 * edge + int(direction)) * CHANNELS_A_LINK,
                schemes[int(direction)],
                boundaries,
                self.timers,
                names,
                stage.device,
            )

        out = Direction.FORWARD if downstream else Direction.BACKWARD
        back = Direction.BACKWARD if downstream else Direction.FORWARD
        end = EdgeEnd(link(LinkSender, out), link(LinkReceiver, back))
        end.incoming.window = self.window
        return end

    def _name(self, stage: int) -> str:
        return f"stage {stage} (rank {self.rank_of[stage]})"
