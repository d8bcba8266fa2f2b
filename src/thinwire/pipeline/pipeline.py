"""A pipeline of stages under one schedule: the step, as all ranks see it.

One training step is

1. the first stage's rank sends every rank the step's header: rows, sequence length, sample ids,
   valid lengths (a wrong input raises the same ValueError everywhere, with nothing under way);
2. both ends of each link plan what will be sent, and receives are posted;
3. torch's schedule runs;
4. gradients are averaged over replicas, and those of tied parameters summed over their owners;
5. every rank tells every other its loss and gradient norm; gradients are clipped alike.

A rank that fails tells the others why before it raises; they raise PeerAborted with that reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.boundary import StepPlan
from thinwire.counters import LinkCounters, Timers
from thinwire.errors import LinkError, NonFiniteError
from thinwire.frame import Direction
from thinwire.network import GlooTransport, Transport
from thinwire.pipeline import engine, reports
from thinwire.pipeline import state as link_state
from thinwire.pipeline.agreement import Agreement, Limits, check_deadline, check_numbers
from thinwire.pipeline.assembly import Connector, Setup, compare, group_ranks, rank_names
from thinwire.pipeline.control import Control
from thinwire.pipeline.failures import Failures, reason_of
from thinwire.pipeline.frozen import Frozen
from thinwire.pipeline.gradients import Gradients, Replicas
from thinwire.pipeline.learned import Learned
from thinwire.pipeline.learned import lines as learned_lines
from thinwire.pipeline.loss import ClassLoss, TokenLoss
from thinwire.pipeline.plan import Plan, Schemes
from thinwire.pipeline.remembered import Remembered, Storage
from thinwire.pipeline.request import Request
from thinwire.pipeline.result import EvalResult, StepResult
from thinwire.pipeline.stage import PipelineStage

_DRAIN_SECONDS = 1.0


class Pipeline:
    """The local ``stages`` of a pipeline, joined to the others by ``plan`` over ``transport``.

    schedule: one of torch's schedules over the same stages (see ``build_schedule``).
    transport: None makes a GlooTransport of our own over the stages' process group (collective).
    max_grad_norm: clip the global gradient norm to this; None only measures it.
    window: receives that are posted ahead on each link. deadline: seconds that a message may take,
    ``first_deadline`` in the first step. tied: parameters that several stages share, by name; their
    gradients are summed over all owners, so equal copies stay equal. seed: of stochastic rounding.
    references: where this rank keeps what its links remember of samples; None: in RAM.
    skip_frozen: stages from the first on that are frozen, and proven to compute the same again, do
    not run for samples that the next link's ends remember, and send nothing.
    reducer: a ``tw.GradientReducer`` of this rank's parameters, over the ranks that hold the same
    stages in other replicas of the pipeline; norms, and the step's ``overflow``, are then of the
    averaged gradient, the same in all replicas.

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
        references: Storage | None = None,
        skip_frozen: bool = True,
        reducer: Replicas | None = None,
    ) -> None:
        self.schedule, self.stages, self.plan = schedule, list(stages), plan or Plan()
        self.max_grad_norm, self.seed = max_grad_norm, seed
        self.deadline, self._replicas = deadline, reducer
        self.n_microbatches = engine.microbatches_of(schedule)
        if not self.stages:
            raise ValueError("a pipeline needs at least one stage on each rank")
        check_numbers(window, seed, max_grad_norm)
        check_deadline(deadline)
        check_deadline(first_deadline)
        name = engine.schedule_name(schedule)
        first = self.stages[0]
        engine.check_microbatches(name, first.num_stages, first.group_size, self.n_microbatches)
        engine.check_modules(name, [s.submod for s in self.stages])
        self.rank: int = first.group_rank
        rank_of: dict[int, int] = dict(first.stage_index_to_group_rank)
        self.transport = transport or GlooTransport(ranks=group_ranks(first.group))
        self.timers = Timers()
        self._first = next((s for s in self.stages if s.is_first), None)
        self._last = next((s for s in self.stages if s.is_last), None)
        self._loss = engine.loss_of(schedule)
        self._asked_to_stop = False
        self._control = self._make_control(rank_of, first_deadline)
        self._setup = self._compare(name, tied or {}, skip_frozen)
        rows = self._setup.max_rows * self.n_microbatches
        self._control.allow_rows(rows, 2 * sum(self._setup.outputs))
        self._gradients = Gradients(
            self.stages, self._setup.ties, self._control, self.rank, reducer
        )
        self._schemes = Schemes(self.plan, first.num_stages - 1)
        self._frozen = self._find_frozen(rank_of, skip_frozen)
        connector = Connector(
            self.transport, self.plan, rank_of, self._control.run, self.timers, window
        )
        self._ends = connector.connect(self.stages)
        for end in self._ends:
            end.incoming.deadline = first_deadline
        self._failures = Failures(
            self.rank, self._control, self.transport, self._ends, self._replicas
        )
        self._agreement = self._make_agreement(rank_of)
        self._remembered = Remembered(
            self._ends, references or Storage(), rows, self.timers, self._schemes.agrees
        )
        self._learned = Learned(self._ends)
        if self.rank == 0:
            self._schemes.warn()
        if self._schemes.remembers:
            self._share_capacity()

    def _make_control(self, rank_of: Mapping[int, int], deadline: float) -> Control:
        ranks = self.stages[0].group_size
        addresses = [0] if self.transport.in_process else range(ranks)
        control = Control(self.transport, self.rank, addresses, rank_names(rank_of))
        control.deadline = deadline
        return control

    def _make_agreement(self, rank_of: Mapping[int, int]) -> Agreement:
        limits = Limits(
            self._setup.max_rows,
            self.n_microbatches,
            self.seed,
            fixed=any(
                pair is None and rank_of[edge] != rank_of[edge + 1]
                for edge, pair in enumerate(self._schemes.pairs)
            ),
            needs_keys=self._schemes.needs_keys,
            has_loss=self._loss is not None,
            schemes=f"{self.plan.forward} / {self.plan.backward}",
            takes=self._schemes.takes,
        )
        return Agreement(
            self.stages, self._control, self._failures, self._ends, self._frozen, limits
        )

    def _find_frozen(self, rank_of: Mapping[int, int], skip: bool) -> Frozen:
        """The stages before edges that may rest: one tensor crosses them, and is remembered."""
        remembering = [
            edge
            for edge, pair in enumerate(self._schemes.pairs)
            if skip and pair is not None and pair[0].recalls and self._setup.outputs[edge] == 1
            if self.transport.in_process or rank_of[edge] != rank_of[edge + 1]
        ]
        return Frozen(self.stages, self._setup.doubts, remembering)

    def _share_capacity(self) -> None:
        """Agree with all ranks on how much each link may remember."""
        with self._failures.shared():
            found = self._control.gather_setup(self._remembered.shares())
        for rank, shares in enumerate(found):
            if isinstance(shares, str):
                self._remembered.close()
                raise ValueError(f"rank {rank}: {shares}")
        self._remembered.settle_capacity(found)

    def _compare(self, schedule: str, tied: Mapping[str, nn.Parameter], skip_frozen: bool) -> Setup:
        """Agree with all ranks on what each was given, or tell them that this one failed."""
        settings = {
            "schedule": schedule,
            "microbatches": self.n_microbatches,
            "num_stages": self.stages[0].num_stages,
            "loss": self._loss is not None,
            "max_grad_norm": self.max_grad_norm,
            "seed": self.seed,
            "skip_frozen": skip_frozen,
        }
        try:
            return compare(self._control, self.stages, self.plan, settings, tied)
        except LinkError as error:  # a ValueError is raised on all ranks alike
            self._control.abort(*reason_of(error, self.rank))
            self.transport.drain(_DRAIN_SECONDS)
            raise

    @property
    def takes(self) -> frozenset[str]:
        """What a training step needs of a context."""
        return self._schemes.takes

    # Steps.

    def step(
        self,
        *inputs: Tensor,
        target: Tensor | None = None,
        sample_ids: Tensor | None = None,
        lengths: Tensor | None = None,
        next_sample_ids: Tensor | None = None,
        loss_scale: float | None = None,
        dense: bool = False,
        measure: bool = False,
        context: Mapping[str, Tensor] | None = None,
        count: int | None = None,
    ) -> StepResult:
        """Forward and backward of one batch over all micro-batches; gradients are left in place.

        inputs: [rows, …] tensors, needed where the first stage is. target: needed where the last
        is. sample_ids [rows] int64 name the rows to schemes that remember them; lengths [rows]
        int64 are their valid positions (default: all). Both are needed where the first stage is;
        ranks that pass them too have them compared. Of samples that are augmented, sample_ids
        [rows, 2] have the augmentation's seed beside each id. next_sample_ids, those of the step
        that follows, let both ends agree on them one step ahead and read from disk what they will
        need; without them a step begins with a round trip more. loss_scale, the same on all ranks,
        multiplies the loss on its way back, and gradients are divided by it at the end: where one
        is not finite, all ranks leave this step's out and find ``overflow`` in the result. With
        ``dense``, the same on all ranks, values travel as they are, and links remember of them what
        they would had their codecs lost nothing: a warm start, before compression begins. With
        ``measure``, as well, senders find out what coding loses: see ``fidelity_reports``.
        context, the same on all ranks, is what both ends of a link may predict by: int64 [rows] or
        [rows, positions] by name, as ``token`` and ``target`` (see docs/prediction.md). count,
        where the last stage is: the valid targets of all replicas' batches, by which the loss is
        divided, and its gradient; without it each replica divides by its own, and unequal ones
        weigh alike. The result's loss is this replica's; their mean over replicas is the step's.

        Raises ValueError on all ranks, with nothing sent, if the inputs do not fit; NonFiniteError
        if an activation, or without loss_scale the gradient, is not finite (no parameter has been
        changed);
        LinkError (PeerAborted with the origin's reason) if another stage failed.
        """
        request = Request(
            True,
            inputs,
            target,
            sample_ids,
            lengths,
            next_sample_ids,
            loss_scale,
            dense=dense,
            measure=measure,
            context=context,
        )
        plan = self._agreement.plan(request)
        self._frozen.accept()
        with self._failures.shared():
            if self._schemes.remembers:
                self._remembered.acquire(plan, self._control.gather_result)
            earlier = self._gradients.set_apart(loss_scale is not None)
            losses = self._run(plan, inputs, target, count)
            self._gradients.gather(earlier, loss_scale or 1.0)
            result = self._finish(plan, self._total(losses), self._tokens(target))
            if self._replicas is not None:
                self._replicas.settle(not result.overflow)
            if result.overflow:
                for parameter, before in earlier:
                    parameter.grad = before
            return result

    def eval(
        self,
        *inputs: Tensor,
        target: Tensor | None = None,
        lengths: Tensor | None = None,
        codec: bool = True,
        context: Mapping[str, Tensor] | None = None,
    ) -> EvalResult:
        """Forward of one batch without gradients; moves no scheme's state.

        ``codec=False`` sends exact values. With ``context``, as ``step`` has it, values are
        predicted by the tables that training has left; nothing is learned. Modules are put into
        evaluation mode meanwhile.
        """
        request = Request(False, inputs, target, None, lengths, codec=codec, context=context)
        plan = self._agreement.plan(request)
        modes = [(m, m.training) for s in self.stages for m in s.submod.modules()]
        with self._failures.shared():
            try:
                for stage in self.stages:
                    stage.submod.eval()
                with torch.no_grad():
                    losses = self._run(plan, inputs, target)
            finally:
                for module, mode in modes:  # one by one: users switch parts of a stage off
                    module.training = mode
            told = [self._total(losses), self._tokens(target)]
            told += [self._loss.correct] if isinstance(self._loss, ClassLoss) else []
            found = self._control.gather_result(told)
            self._settle()
        correct = [f[2] for f in found if len(f) > 2]
        return EvalResult(
            math.fsum(f[0] for f in found),
            sum(f[1] for f in found),
            sum(correct) if correct else None,
        )

    def _total(self, losses: list[float]) -> float:
        """The batch's loss: TokenLoss divides by the batch's tokens, others are averaged."""
        parts = 1 if isinstance(self._loss, TokenLoss) else max(len(losses), 1)
        return math.fsum(losses) / parts

    def _count(self, target: Tensor, count: int | None) -> float:
        """What a training step's loss is divided by."""
        if count is None:
            return float(self._loss.tokens(target))
        return count / (1 if self._replicas is None else self._replicas.size)

    def _tokens(self, target: Tensor | None) -> int:
        counts = self._last is not None and isinstance(self._loss, TokenLoss)
        return self._loss.tokens(target) if counts else 0

    def _run(
        self,
        plan: StepPlan,
        inputs: Sequence[Tensor],
        target: Tensor | None,
        count: int | None = None,
    ) -> list[float]:
        """Run the schedule; the micro-batches' losses, where the last stage is."""
        if isinstance(self._loss, TokenLoss) and target is not None:
            self._loss.count = self._count(target, count) if plan.train else 1
        if isinstance(self._loss, ClassLoss):
            self._loss.correct = 0
        self._begin(plan)
        losses: list[Tensor] = []
        arguments: dict[str, Any] = {"return_outputs": False}
        if self._last is not None:
            arguments |= {"target": target, "losses": losses}
        run = self.schedule.step if plan.train else self.schedule.eval
        run(*(inputs if self._first is not None else ()), **arguments)
        return [loss.detach().item() for loss in losses]

    def _begin(self, plan: StepPlan) -> None:
        """Give the plan to the edges, then to the stages, the last one first."""
        for end in self._ends:
            forward = end.incoming.place.direction == Direction.FORWARD
            end.begin_step(plan, receives=plan.train or forward, sends=plan.train or not forward)
        local: dict[int, PipelineStage] = {}
        for stage in sorted(self.stages, key=lambda s: s.stage_index, reverse=True):
            stage.begin_step(plan, local.get(stage.stage_index + 1))
            local[stage.stage_index] = stage
        if plan.train and self._schemes.remembers:
            self._remembered.fetch(plan)

    def _finish(self, plan: StepPlan, loss: float, tokens: int) -> StepResult:
        """Exchange losses and norms, clip, and check that the gradient is finite."""
        flagged = [(e.outgoing.place.edge, e.outgoing.flagged) for e in self._ends]
        # a bad gradient spoils all stages before the one that it came from: the last edge tells
        worst = max((f for f in flagged if f[1]), default=(-1, ""))
        held = self._remembered.report(plan) if self._schemes.remembers else None
        stop = int(self._asked_to_stop)
        square = self._gradients.square_norm()
        told = [loss, tokens, square, worst, stop, held, self._frozen.report()]
        told.append(self._learned.report())
        self._have_patience()
        found = self._control.gather_result(told)
        self._frozen.conclude(f[6] for f in found)
        learned = [f[7] for f in found]
        if self._schemes.remembers:
            reports = [f[5] for f in found]
            self._remembered.conclude(plan, reports, self._control.gather_result)
        self._settle()
        loss = math.fsum(f[0] for f in found)
        norm = math.sqrt(sum(f[2] for f in found)) if all(f[2] >= 0 for f in found) else math.nan
        stopped, tokens = any(f[4] for f in found), sum(f[1] for f in found)
        if not math.isfinite(norm) and plan.loss_scale is not None:
            return StepResult(loss, tokens, norm, stopped, overflow=True)
        if not math.isfinite(norm):
            where = max(tuple(f[3]) for f in found)[1] or "no gradient on an edge was affected"
            raise NonFiniteError(
                f"step {plan.step}: the gradient is not finite (norm {norm}, loss {loss}; {where})"
            )
        for end in self._ends:
            end.outgoing.end_step()
            end.incoming.end_step()
        self._learned.conclude(learned)
        self._gradients.clip(norm, self.max_grad_norm)
        return StepResult(loss, tokens, norm, stopped)

    def _have_patience(self) -> None:
        """Wait longer than for a message where no gradient comes back: a rank may then be done at
        once, while the others have the whole step before them."""
        if any(end.incoming.silent for end in self._ends):
            turns = self.n_microbatches + self.stages[0].num_stages
            self._control.deadline = max(self._control.deadline, turns * self.deadline)

    def _settle(self) -> None:
        """All ranks have received everything: free the sent buffers, and leave start-up behind."""
        self.transport.flush(self.deadline)
        self._control.deadline = self.deadline
        for end in self._ends:
            end.incoming.deadline = self.deadline

    # Stopping, and going on.

    def ask_to_stop(self) -> None:
        """Have all ranks see ``StepResult.stop`` after the same step; fit for a signal handler."""
        self._asked_to_stop = True

    def checkpoint(self, folder: str | Path, references: bool = True) -> dict[str, Any]:
        """Write this rank's part of what the links remember into ``folder``, between two steps.

        Returns the rest of the state as JSON values, for ``restore``. Without ``references`` the
        links begin with first visits after it. Raises OSError where it cannot write.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        return {
            "step": self._agreement.step,
            "counters": [counters.state() for counters in self.link_counters()],
            "references": (
                link_state.save_references(self._remembered, folder) if references else []
            ),
            "learned": self._learned.save(folder),
            "frozen": link_state.save_frozen(self._frozen, folder),
        }

    def restore(self, folder: str | Path, saved: Mapping[str, Any]) -> list[str]:
        """Go on from what ``checkpoint`` wrote and returned on this rank (collective).

        The ends of each link compare their references; where they differ, both drop them. Returns
        a line for each reason why links begin without references, the same on all ranks. Raises
        ValueError, with nothing changed, where ``saved`` is nothing that ``checkpoint`` returns;
        PeerAborted on the other ranks.
        """
        with self._failures.shared():
            link_state.check(saved)
            self._agreement.step = saved["step"]
            link_state.restore_counters(self.link_counters(), saved["counters"])
            without = link_state.load_references(
                self._remembered, Path(folder), saved["references"]
            )
            anew = link_state.load_frozen(self._frozen, Path(folder), saved["frozen"])
            forgot = self._learned.load(Path(folder), saved["learned"])
            mine = [without, anew, saved["frozen"]["broken"], forgot, self._learned.digests()]
            found = self._control.gather_setup(mine)
            self._frozen.conclude(-1 if one[2] is None else one[2] for one in found)
            lines = link_state.without_references(
                {k: v for one, *_ in found for k, v in one.items()}
            )
            lines += [
                f"samples run through frozen stages once more ({one[1]})" for one in found if one[1]
            ]
            lines += learned_lines((one[3] for one in found), "what is learned anew")
            if not self._learned.conclude(one[4] for one in found):
                lines.append("what links expect differs at their two ends: it is learned anew")
            if not self._remembered.compare(self._control.gather_setup):
                lines.append("references that differ at the two ends of a link are dropped")
            self.transport.flush(self.deadline)
        return lines

    def expect(self, parts: Mapping[Path, Mapping[str, Any]]) -> list[str]:
        """Evaluate by the tables of a checkpoint, under the schemes' ``evaluated()``: by folder
        what ``checkpoint`` returned, of any ranks that held these links (collective).

        Returns a line for each link that expects nothing.
        """
        with self._failures.shared():
            without = self._learned.adopt({at: saved["learned"] for at, saved in parts.items()})
            found = self._control.gather_setup([without, self._learned.digests()])
            lines = learned_lines((one[0] for one in found), "nothing")
            if not self._learned.conclude(one[1] for one in found):
                lines.append("what links expect differs at their two ends: they expect nothing")
            self.transport.flush(self.deadline)
        return lines

    def hold(self, folder: str | Path, saved: Mapping[str, Any]) -> None:
        """Leave what another checkpoint of this rank needs untouched, until it is released."""
        link_state.hold_references(self._remembered, Path(folder), saved["references"])

    def release(self, folder: str | Path) -> None:
        """Say that the checkpoint in ``folder`` is about to be deleted."""
        link_state.release_references(self._remembered, Path(folder))

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
        return reports.of_links(self._gathered([c.report() for c in self.link_counters()]))

    def fidelity_reports(self) -> list[dict[str, Any]]:
        """What coding lost on every link in the last step, which was measured (collective):
        ``relative_error``, ``cosine`` and ``outlier_ratio`` beside edge and direction."""
        return reports.of_fidelity(self._gathered(reports.fidelity(self._ends)))

    def reference_reports(self) -> list[dict[str, Any]]:
        """What all ends of all links remember, and where, as plain numbers, the same on all ranks
        (collective); see docs/train.md."""
        found = self._gathered([{"rank": self.rank, **o} for o in self._remembered.facts()])
        return [one for rank in found for one in rank]

    def _gathered(self, mine: Any) -> list[Any]:
        """All ranks' JSON values, between two steps (collective)."""
        with self._failures.shared():
            found = self._control.gather_setup(mine)
            self.transport.flush(self.deadline)
        return found

    def state_digests(self) -> dict[str, int]:
        """A hash of each link's shared state at this rank; equal at both ends of a link."""
        digests = {}
        for end in self._ends:
            for link in (end.outgoing, end.incoming):
                where = f"edge {link.place.edge} {link.place.direction.name.lower()}"
                for index, state in link.states.items():
                    digests[f"{where} {index} {link.role}"] = state.digest()
        return digests

    def close(self) -> None:
        """Release the transport; the pipeline is unusable afterwards."""
        self._failures.reason = self._failures.reason or "it was closed"
        self._remembered.close()
        self.transport.close()
