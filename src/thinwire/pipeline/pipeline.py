"""A pipeline of stages under one schedule: the step, as all ranks see it.

One training step is

1. the first stage's rank sends every rank the step's header: rows, sequence length, sample ids,
   valid lengths (a wrong input raises the same ValueError everywhere, with nothing under way);
2. both ends of each link plan what will be sent, and receives are posted;
3. torch's schedule runs;
4. gradients of tied parameters are summed over their owners;
5. every rank tells every other its loss and gradient norm; gradients are clipped alike.

A rank that fails tells the others why before it raises; they raise PeerAborted with that reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.counters import LinkCounters, Timers, sum_reports
from thinwire.edge import Boundary, EdgeEnd, LinkReceiver, LinkSender, Names, StepPlan
from thinwire.errors import LinkError, NonFiniteError, PeerAborted
from thinwire.frame import Direction, Place
from thinwire.network import GlooTransport, Transport
from thinwire.pipeline import engine
from thinwire.pipeline.agreement import (
    check_agreement,
    describe,
    digest,
    group_ranks,
    input_error,
    origin_of,
    split_rows,
)
from thinwire.pipeline.control import Control
from thinwire.pipeline.loss import TokenLoss
from thinwire.pipeline.plan import Plan
from thinwire.pipeline.stage import PipelineStage

_CHANNELS_A_LINK = 1 << 16
_DRAIN_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What every rank knows after a step: loss, valid tokens (0 without TokenLoss), global norm."""

    loss: float
    tokens: int
    grad_norm: float


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """Sum of the loss over valid tokens, and their number; equal on all ranks."""

    loss_sum: float
    tokens: int

    @property
    def loss(self) -> float:
        """Mean loss a token."""
        return self.loss_sum / max(self.tokens, 1)


class Pipeline:
    """The local ``stages`` of a pipeline, joined to the others by ``plan`` over ``transport``.

    schedule: one of torch's schedules over the same stages (see ``build_schedule``).
    transport: None makes a GlooTransport of our own over the stages' process group (collective).
    max_grad_norm: clip the global gradient norm to this; None only measures it.
    window: receives that are posted ahead on each link. deadline: seconds that a message may take,
    ``first_deadline`` in the first step. tied: parameters that several stages share, by name; their
    gradients are summed over all owners, so equal copies stay equal. seed: of stochastic rounding.

    Creating one is collective: ranks check that the stages fit together. Raises ValueError if not.
    """

    def __init__(
        self,
        schedule: Any,
        stages: Sequence[PipelineStage],
        plan: Plan | None = None,
        *,
        transport: Transport | None = None,
        max_grad_norm: float | None = None,
        window: int = 8,
        deadline: float = 60.0,
        first_deadline: float = 300.0,
        tied: Mapping[str, nn.Parameter] | None = None,
        seed: int = 0,
    ) -> None:
        self.schedule, self.stages = schedule, list(stages)
        self.plan = plan or Plan()
        self.max_grad_norm, self.seed = max_grad_norm, seed
        self.deadline = deadline
        self.n_microbatches = engine.microbatches_of(schedule)
        if window < 1:
            raise ValueError(f"window={window}: at least 1 receive has to be posted ahead")
        name = engine.schedule_name(schedule)
        first = self.stages[0]
        engine.check_microbatches(name, first.num_stages, first.group_size, self.n_microbatches)
        engine.check_modules(name, [s.submod for s in self.stages])
        self.num_stages = first.num_stages
        self.rank: int = first.group_rank
        self._rank_of: dict[int, int] = dict(first.stage_index_to_group_rank)
        self.transport = transport or GlooTransport(ranks=group_ranks(first.group))
        self.timers = Timers()
        self._first = next((s for s in self.stages if s.is_first), None)
        self._last = next((s for s in self.stages if s.is_last), None)
        self._loss = engine.loss_of(schedule)
        self._failed: str | None = None
        self._step = 0
        self._mode: bool | None = None  # training, evaluation, or nothing yet
        self._control = self._make_control()
        self._control.deadline = first_deadline
        self._check_together(tied or {})
        self._needs_keys = False
        self._connect(window, first_deadline)
        self._quiet = (
            {"return_outputs": False}
            if "return_outputs" in inspect.signature(schedule.step).parameters
            else {}
        )

    # Set-up.

    def _address(self, stage: int) -> int:
        return stage if self.transport.in_process else self._rank_of[stage]

    def _make_control(self) -> Control:
        first = self.stages[0]
        declared = self._first.inputs[0].shape if self._first else ()
        rows = (declared[0] if declared else 1) * self.n_microbatches
        return Control(
            self.transport,
            self.rank,
            range(first.group_size) if not self.transport.in_process else [0],
            2 * self.num_stages * _CHANNELS_A_LINK,
            max_header=0 if self._first else 64 * max(rows, 1 << 14),
        )

    def _check_together(self, tied: Mapping[str, nn.Parameter]) -> None:
        """Compare what the ranks were given; agree on run number and owners of tied parameters."""
        mine = {
            "run": int.from_bytes(os.urandom(8), "little"),
            "plan": [self.plan.forward, self.plan.backward, sorted(self.plan.edges.items())],
            "microbatches": self.n_microbatches,
            "stages": {
                str(s.stage_index): [describe(s.inputs), describe(s.outputs)] for s in self.stages
            },
            "tied": {n: [list(p.shape), digest(p)] for n, p in tied.items()},
        }
        found = self._control.gather_setup(mine)
        self._control.run = found[0]["run"]
        stages = check_agreement(found, self.num_stages)
        declared = stages[0][0][0]["shape"]
        self._max_rows = declared[0] if declared else 1
        self._max_len = declared[1] if len(declared) > 1 else None
        for stage in self.stages:
            stage.inputs = [self._place_boundary(b) for b in stage.inputs]
            stage.outputs = [self._place_boundary(b) for b in stage.outputs]
        self._tied: list[tuple[int, list[int], nn.Parameter]] = []
        for slot, tied_name in enumerate(sorted({n for other in found for n in other["tied"]})):
            owners = [r for r, other in enumerate(found) if tied_name in other["tied"]]
            copies = [found[r]["tied"][tied_name] for r in owners]
            if any(c != copies[0] for c in copies):
                raise ValueError(f"the copies of tied parameter {tied_name!r} are not equal")
            if tied_name in tied:
                self._tied.append((slot, owners, tied[tied_name]))

    def _place_boundary(self, boundary: Boundary) -> Boundary:
        """Mark which dimensions of a boundary tensor vary with rows and sequence length."""
        shape = boundary.shape
        wide = len(shape) >= (3 if boundary.dtype.is_floating_point else 2)
        return dataclasses.replace(
            boundary,
            batched=bool(shape) and shape[0] == self._max_rows,
            sequence=wide and shape[1] == self._max_len,
        )

    def _connect(self, window: int, deadline: float) -> None:
        """Give the stages their edges to neighbours that are reached over the transport."""
        ends: dict[tuple[int, int], EdgeEnd] = {}
        local = {s.stage_index for s in self.stages}
        for stage in self.stages:
            for neighbour in (stage.stage_index - 1, stage.stage_index + 1):
                if not 0 <= neighbour < self.num_stages:
                    continue
                schemes = self.plan.schemes(min(stage.stage_index, neighbour))
                here = neighbour in local
                self._needs_keys |= schemes is not None and any(x.needs_keys for x in schemes)
                if schemes is None or (here and not self.transport.in_process):
                    continue
                end = self._edge_end(stage, neighbour, schemes)
                end.incoming.window, end.incoming.deadline = window, deadline
                ends[stage.stage_index, neighbour] = end
                if neighbour < stage.stage_index:
                    stage.previous = end
                else:
                    stage.next = end
        if self.transport.in_process:
            for (a, b), end in ends.items():
                end.peer = ends[b, a]
        self._ends = list(ends.values())

    def _edge_end(
        self, stage: PipelineStage, neighbour: int, schemes: tuple[Any, Any]
    ) -> EdgeEnd:
        edge = min(stage.stage_index, neighbour)
        downstream = neighbour > stage.stage_index
        names = Names(self._name(stage.stage_index), self._name(neighbour))
        boundaries = stage.outputs if downstream else stage.inputs
        transport = self.transport.endpoint(self._address(stage.stage_index))

        def link(kind: type[Any], direction: Direction) -> Any:
            return kind(
                transport,
                self._address(neighbour),
                Place(self._control.run, 0, 0, edge, direction),
                (2 * edge + int(direction)) * _CHANNELS_A_LINK,
                schemes[int(direction)],
                boundaries,
                self.timers,
                names,
                stage.device,
            )

        out = Direction.FORWARD if downstream else Direction.BACKWARD
        back = Direction.BACKWARD if downstream else Direction.FORWARD
        return EdgeEnd(link(LinkSender, out), link(LinkReceiver, back))

    def _name(self, stage: int) -> str:
        return f"stage {stage} (rank {self._rank_of[stage]})"

    # Steps.

    def step(
        self,
        *inputs: Tensor,
        target: Tensor | None = None,
        sample_ids: Tensor | None = None,
        lengths: Tensor | None = None,
        next_sample_ids: Tensor | None = None,
    ) -> StepResult:
        """Forward and backward of one batch over all micro-batches; gradients are left in place.

        inputs: [rows, …] tensors, needed where the first stage is. target: needed where the last
        is. sample_ids [rows] int64 name the rows to schemes that remember them; lengths [rows]
        int64 are their valid positions (default: all). Both are needed where the first stage is;
        ranks that pass them too have them compared. next_sample_ids lets a store prefetch; the
        RAM store needs none.

        Raises ValueError on all ranks, with nothing sent, if the inputs do not fit; NonFiniteError
        if an activation or the gradient is not finite (no parameter has been changed);
        LinkError (PeerAborted with the origin's reason) if another stage failed.
        """
        plan = self._agree(True, True, inputs, target, sample_ids, lengths)
        with self._failing_together():
            losses = self._run(plan, inputs, target)
            for slot, owners, parameter in self._tied:
                self._sum_tied(slot, owners, parameter)
            mean = isinstance(self._loss, TokenLoss) or not losses
            loss = math.fsum(losses) / (1 if mean else len(losses))
            result = self._finish(loss, self._tokens(target))
        return result

    def eval(
        self,
        *inputs: Tensor,
        target: Tensor | None = None,
        lengths: Tensor | None = None,
        codec: bool = True,
    ) -> EvalResult:
        """Forward of one batch without gradients; moves no scheme's state.

        ``codec=False`` sends exact values. Modules are put into evaluation mode meanwhile.
        """
        plan = self._agree(False, codec, inputs, target, None, lengths)
        modes = [s.submod.training for s in self.stages]
        with self._failing_together():
            try:
                for stage in self.stages:
                    stage.submod.eval()
                with torch.no_grad():
                    losses = self._run(plan, inputs, target)
            finally:
                for stage, mode in zip(self.stages, modes, strict=True):
                    stage.submod.train(mode)
            found = self._control.gather_result([math.fsum(losses), self._tokens(target), 0, ""])
            self._settle()
        return EvalResult(math.fsum(f[0] for f in found), sum(f[1] for f in found))

    def _tokens(self, target: Tensor | None) -> int:
        counts = self._last is not None and isinstance(self._loss, TokenLoss)
        return self._loss.tokens(target) if counts else 0

    def _run(
        self, plan: StepPlan, inputs: Sequence[Tensor], target: Tensor | None
    ) -> list[float]:
        """Run the schedule; the micro-batches' losses, where the last stage is."""
        if isinstance(self._loss, TokenLoss) and target is not None:
            self._loss.count = self._loss.tokens(target) if plan.train else 1
        for end in self._ends:
            forward = end.incoming.place.direction == Direction.FORWARD
            end.begin_step(plan, receives=plan.train or forward, sends=plan.train or not forward)
        losses: list[Tensor] = []
        arguments: dict[str, Any] = dict(self._quiet)
        if self._last is not None:
            arguments |= {"target": target, "losses": losses}
        run = self.schedule.step if plan.train else self.schedule.eval
        run(*(inputs if self._first is not None else ()), **arguments)
        return [float(loss) for loss in losses]

    def _sum_tied(self, slot: int, owners: list[int], parameter: nn.Parameter) -> None:
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        total: Tensor | None = None
        for part in self._control.exchange_tensor(grad, owners, slot):
            total = part.clone() if total is None else total + part
        parameter.grad = total

    def _finish(self, loss: float, tokens: int) -> StepResult:
        """Exchange losses and norms, clip, and check that the gradient is finite."""
        flagged = [(e.outgoing.place.edge, e.outgoing.flagged) for e in self._ends]
        # a bad gradient spoils all stages before the one that it came from: the last edge tells
        worst = max((f for f in flagged if f[1]), default=(-1, ""))
        found = self._control.gather_result([loss, tokens, self._square_norm(), worst])
        self._settle()
        loss = math.fsum(f[0] for f in found)
        norm = math.sqrt(sum(f[2] for f in found)) if all(f[2] >= 0 for f in found) else math.nan
        if not math.isfinite(norm):
            where = max(tuple(f[3]) for f in found)[1] or "no gradient on an edge was affected"
            raise NonFiniteError(
                f"step {self._step}: the gradient is not finite (norm {norm}, loss {loss}; {where})"
            )
        if self.max_grad_norm is not None:
            scale = self.max_grad_norm / (norm + 1e-6)
            if scale < 1.0:
                for parameter in self._parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(scale)
        return StepResult(loss, sum(f[1] for f in found), norm)

    def _settle(self) -> None:
        """All ranks have received everything: free the sent buffers, and leave start-up behind."""
        self.transport.flush(self.deadline)
        self._control.deadline = self.deadline
        for end in self._ends:
            end.incoming.deadline = self.deadline

    def _parameters(self) -> Iterator[nn.Parameter]:
        for stage in self.stages:
            yield from stage.submod.parameters()

    def _square_norm(self) -> float:
        """Sum of squares of this rank's gradients in float64; a tied one counts at one owner."""
        counted_elsewhere = {id(p) for _, owners, p in self._tied if owners[0] != self.rank}
        total = 0.0
        for parameter in self._parameters():
            if parameter.grad is not None and id(parameter) not in counted_elsewhere:
                norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)
                total += float(norm) ** 2
        return total

    # Agreeing on a step, or on giving up.

    def _agree(
        self,
        train: bool,
        codec: bool,
        inputs: Sequence[Tensor],
        target: Tensor | None,
        sample_ids: Tensor | None,
        lengths: Tensor | None,
    ) -> StepPlan:
        """The step's plan, the same on all ranks, or the same ValueError."""
        if self._failed is not None:
            raise LinkError(f"this pipeline has given up: {self._failed}")
        header = None
        if self._first is not None:
            header = self._header(train, codec, inputs, sample_ids, lengths)
        try:
            header = self._control.broadcast_header(header, root=self._rank_of[0])
        except PeerAborted as error:
            self._failed = str(error)
            raise
        self._step += 1
        if header["error"]:
            raise ValueError(header["error"])
        mine = self._mismatch(header, train, target, sample_ids)
        if self._mode != train:
            # torch's own set-up messages come next: make sure that all ranks will take part
            with self._failing_together():
                answers = self._control.gather_result(mine)
            mine = next((a for a in answers if a), None)
            if mine:
                raise ValueError(mine)
            self._mode = train
        if mine:
            with self._failing_together():
                raise ValueError(mine)
        return StepPlan(
            self._step,
            train,
            split_rows(header["rows"], header["ids"], header["lengths"], self.n_microbatches),
            header["seq_len"],
            header["codec"],
            self.seed,
        )

    def _header(
        self,
        train: bool,
        codec: bool,
        inputs: Sequence[Tensor],
        sample_ids: Tensor | None,
        lengths: Tensor | None,
    ) -> dict[str, Any]:
        assert self._first is not None
        error = input_error(
            self._first.inputs, self._max_rows, self.n_microbatches, inputs, sample_ids, lengths
        )
        if error is None and train and sample_ids is None and self._needs_keys:
            error = f"plan {self.plan.forward} / {self.plan.backward} needs sample_ids"
        shape = inputs[0].shape if inputs else ()
        return {
            "error": error,
            "train": train,
            "codec": codec,
            "rows": int(shape[0]) if len(shape) else 0,
            "seq_len": int(shape[1]) if len(shape) > 1 else None,
            "ids": None if sample_ids is None or error else sample_ids.tolist(),
            "lengths": None if lengths is None or error else lengths.tolist(),
        }

    def _mismatch(
        self,
        header: dict[str, Any],
        train: bool,
        target: Tensor | None,
        sample_ids: Tensor | None,
    ) -> str | None:
        """Why this rank cannot take part in the step that the first stage announced."""
        if header["train"] != train:
            return f"rank {self.rank} was called for another kind of step than the first stage's rank"
        if sample_ids is not None and header["ids"] not in (None, sample_ids.tolist()):
            return f"rank {self.rank} was given other sample_ids than the first stage's rank"
        if self._last is not None and engine.loss_of(self.schedule) is not None:
            if target is None:
                return f"rank {self.rank} holds the last stage and needs target"
            if target.shape[0] != header["rows"]:
                return (
                    f"rank {self.rank} was given a target of {target.shape[0]} rows, "
                    f"the first stage {header['rows']}"
                )
        return None

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        """If anything is raised inside, tell the other ranks why; the pipeline is then unusable."""
        try:
            yield
        except BaseException as error:
            origin = origin_of(error)
            self._failed = str(origin) or type(origin).__name__
            kind = origin.kind if isinstance(origin, PeerAborted) else type(origin).__name__
            with contextlib.suppress(Exception):
                for end in self._ends:
                    end.outgoing.abort(kind, self._failed)
                self._control.abort(kind, self._failed)
                self.transport.drain(_DRAIN_SECONDS)
            if origin is not error:
                raise origin from error
            raise

    # What happened.

    def take_timers(self) -> dict[str, float]:
        """Seconds of compute, waiting, encoding and decoding on this rank since the last call."""
        for stage in self.stages:
            self.timers.compute_s += stage.timers.take()["compute_s"]
        return self.timers.take()

    def link_counters(self) -> list[LinkCounters]:
        """What this rank has sent: each outgoing link, then control traffic."""
        return [*(end.outgoing.counters for end in self._ends), self._control.counters]

    def link_reports(self) -> list[dict[str, Any]]:
        """All links' counters as plain numbers, the same on all ranks (collective)."""
        with self._failing_together():
            mine = [c.report() for c in self.link_counters()]
            found = self._control.gather_setup(mine)
            self.transport.flush(self.deadline)
        links = [r for rank in found for r in rank if r["edge"] >= 0]
        links.sort(key=lambda r: (r["edge"], r["direction"] != "forward"))
        control = [r for rank in found for r in rank if r["edge"] < 0]
        return [*links, sum_reports(control)]

    def state_digests(self) -> dict[str, int]:
        """A hash of each link's shared state at this rank; equal at both ends of a link."""
        digests = {}
        for end in self._ends:
            for link in (end.outgoing, end.incoming):
                for index, state in link.states.items():
                    role = "sender" if link is end.outgoing else "receiver"
                    key = f"edge {link.place.edge} {link.place.direction.name.lower()} {index} {role}"
                    digests[key] = state.digest()
        return digests

    def close(self) -> None:
        """Release the transport."""
        self.transport.close()
