"""What the ranks of a pipeline tell each other of a step before it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.boundary import MicroBatch, StepPlan
from thinwire.edge import EdgeEnd
from thinwire.pipeline.control import Control
from thinwire.pipeline.failures import Failures
from thinwire.pipeline.frozen import Frozen
from thinwire.pipeline.request import (
    Request,
    context_digests,
    context_error,
    input_error,
    keys_of,
    with_own_context,
)
from thinwire.pipeline.stage import PipelineStage

_LONGEST_DEADLINE = 7 * 86400


@dataclasses.dataclass(frozen=True)
class Limits:
    """What holds for all steps of a pipeline.

    ``rows``: of a micro-batch at most. ``fixed``: an edge is left to torch's operations, which take
    the declared shape only. ``schemes``: those of the plan, as errors name them.
    ``takes``: what they need of a context.
    """

    rows: int
    microbatches: int
    seed: int
    fixed: bool
    needs_keys: bool
    has_loss: bool
    schemes: str
    takes: frozenset[str] = frozenset()


def check_deadline(seconds: float) -> None:
    """Raise ValueError for a time that no wait can keep."""
    if not isinstance(seconds, int | float) or not 0 < seconds <= _LONGEST_DEADLINE:
        raise ValueError(
            f"a deadline of {seconds} s: it must be over 0 and at most {_LONGEST_DEADLINE} s"
        )


def check_numbers(window: int, seed: int, max_grad_norm: float | None) -> None:
    """Raise ValueError for settings of a pipeline that are no sensible numbers."""
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"window={window!r}: a whole number of receives to post ahead, from 1")
    if not isinstance(seed, int):
        raise ValueError(f"seed={seed!r} is no whole number")
    if max_grad_norm is not None and not (
        isinstance(max_grad_norm, int | float) and 0 < max_grad_norm < math.inf
    ):
        raise ValueError(f"max_grad_norm={max_grad_norm!r}: a number over 0, or None")


class Agreement:
    """How all ranks come to the same plan of a step, or to the same ValueError.

    The first stage's rank announces the step; each other checks whether it fits what it was given.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        control: Control,
        failures: Failures,
        ends: Sequence[EdgeEnd],
        frozen: Frozen,
        limits: Limits,
    ) -> None:
        self._first = next((s for s in stages if s.is_first), None)
        self._last = next((s for s in stages if s.is_last), None)
        self._rank: int = stages[0].group_rank
        self._root: int = stages[0].stage_index_to_group_rank[0]
        self._control, self._failures, self._ends = control, failures, ends
        self._frozen, self._limits = frozen, limits
        #: Steps that were announced so far, evaluation included.
        self.step = 0
        self._mode: bool | None = None  # training, evaluation, or nothing yet

    def plan(self, request: Request) -> StepPlan:
        """The plan of the step that this rank was called for (collective)."""
        self._failures.check()
        request = with_own_context(request)
        announced = None if self._first is None else self._announcement(self._first, request)
        with self._failures.shared():
            announced = self._control.broadcast_header(announced, root=self._root)
        self.step += 1
        if announced["error"]:
            raise ValueError(announced["error"])
        try:
            mine = self._mismatch(announced, request)
        except Exception as error:  # noqa: BLE001  told to all ranks, as every mismatch is
            mine = f"rank {self._rank}: its arguments cannot be read: {error}"
        if self._mode != announced["train"]:
            # torch's own set-up messages come next: make sure that all ranks will take part
            with self._failures.shared():
                answers = self._control.gather_result(mine)
            mine = next((a for a in answers if a), None)
            if mine:
                raise ValueError(mine)
            self._mode = announced["train"]
        limits = self._limits
        plan = step_plan(
            announced,
            self.step,
            limits.microbatches,
            limits.seed,
            self._frozen.count,
            request.context,
        )
        if mine:
            with self._failures.shared():
                for end in self._ends:
                    end.outgoing.begin_step(plan)  # so that each receiver is told
                raise ValueError(mine)
        return plan

    def _announcement(self, first: PipelineStage, request: Request) -> dict[str, Any]:
        """The step's header, or what is wrong with the first stage's inputs."""
        limits = self._limits
        try:
            error = input_error(
                first.inputs, request, limits.rows, limits.microbatches, limits.fixed
            )
            if error is None and request.train and request.sample_ids is None and limits.needs_keys:
                error = f"plan {limits.schemes} needs sample_ids"
            missing = sorted(limits.takes - set(request.context or ()))
            needed = request.train or request.context is not None
            if error is None and needed and missing:
                error = f"plan {limits.schemes} needs context with {', '.join(missing)}"
            if error is None and request.context is not None:
                error = self._unfit_context(request.context, *sizes_of(request))
            if error is not None:
                return {"error": error}
            return header(request, self._known(first, request))
        except Exception as error:  # noqa: BLE001  told to all ranks, as every wrong input is
            return {"error": f"the inputs cannot be read: {type(error).__name__}: {error}"}

    def _unfit_context(
        self, context: Mapping[str, Tensor], rows: int, seq_len: int | None
    ) -> str | None:
        """Why the schemes of this rank's links can make nothing of the context of ``rows`` rows."""
        first = -(-rows // self._limits.microbatches)
        mine = {name: tensor[:first] for name, tensor in context.items()}
        for end in self._ends:
            for link in (end.outgoing, end.incoming):
                try:
                    link.try_context(mine, first, seq_len)
                except ValueError as error:
                    return f"context of {list(mine)} at edge {link.place.edge}: {error}"
        return None

    def _known(self, first: PipelineStage, request: Request) -> str | None:
        """A digit for each row, 1 where its input is that of its sample's last visit."""
        if not request.train or request.sample_ids is None:
            return None
        lengths = None if request.lengths is None else request.lengths.tolist()
        return self._frozen.known(
            first.inputs, request.inputs, keys_of(request.sample_ids), lengths
        )

    def _mismatch(self, header: dict[str, Any], request: Request) -> str | None:
        """Why this rank cannot take part in the step that the first stage announced."""
        ids, lengths, target = request.sample_ids, request.lengths, request.target
        if header["train"] != request.train:
            return (
                f"rank {self._rank} was called for another kind of step than the first stage's rank"
            )
        if ids is not None and not isinstance(ids, Tensor):
            return f"rank {self._rank} was given sample_ids that are no tensor"
        if ids is not None and header["ids"] not in (None, keys_of(ids)):
            return f"rank {self._rank} was given other sample_ids than the first stage's rank"
        if lengths is not None and header["lengths"] != lengths.tolist():
            return f"rank {self._rank} was given other lengths than the first stage's rank"
        if request.loss_scale != header["loss_scale"]:
            return f"rank {self._rank} was given another loss_scale than the first stage's rank"
        for name, given in (("dense", request.dense), ("measure", request.measure)):
            if bool(given) != header[name]:
                return f"rank {self._rank} was given another {name} than the first stage's rank"
        if header["context"] or request.context:
            wrong = context_error(request.context, header["rows"])
            if wrong is not None or request.context is None:
                what = wrong or "without context"
                return f"rank {self._rank}: {what}; all ranks need that of the first stage's rank"
            if context_digests(request.context) != header["context"]:
                return f"rank {self._rank} was given another context than the first stage's rank"
            unfit = self._unfit_context(request.context, header["rows"], header["seq_len"])
            if unfit is not None:
                return f"rank {self._rank}: {unfit}"
        if request.train and not torch.is_grad_enabled():
            return f"rank {self._rank} has gradients switched off; use eval, or enable them"
        if self._last is not None and self._limits.has_loss:
            if not isinstance(target, Tensor) or target.dim() == 0 or target.is_meta:
                return f"rank {self._rank} holds the last stage and needs target, a tensor of rows"
            if target.shape[0] != header["rows"]:
                return (
                    f"rank {self._rank} was given a target of {target.shape[0]} rows, "
                    f"the first stage {header['rows']}"
                )
        return self._frozen.changed() if request.train else None


def sizes_of(request: Request) -> tuple[int, int | None]:
    """Rows and positions of the first stage's inputs."""
    shape = request.inputs[0].shape
    return shape[0] if shape else 0, shape[1] if len(shape) > 1 else None


def header(request: Request, known: str | None) -> dict[str, Any]:
    """What the first stage's rank tells the others of a step, as JSON values.

    ``known``: a digit for each row, 1 where its input is that of its sample's last visit.
    """
    rows, seq_len = sizes_of(request)
    ids, following, lengths = request.sample_ids, request.next_ids, request.lengths
    return {
        "error": None,
        "train": request.train,
        "codec": request.codec,
        "rows": rows,
        "seq_len": seq_len,
        "ids": None if ids is None else keys_of(ids),
        "next": None if following is None else keys_of(following),
        "lengths": None if lengths is None else lengths.tolist(),
        "known": known,
        "loss_scale": request.loss_scale,
        "dense": bool(request.dense),
        "measure": bool(request.measure),
        "context": context_digests(request.context),
    }


def step_plan(
    header: dict[str, Any],
    step: int,
    n_microbatches: int,
    seed: int,
    frozen: int = 0,
    context: Mapping[str, Tensor] | None = None,
) -> StepPlan:
    """The plan that follows from a header."""
    ids, lengths, known = header["ids"], header["lengths"], header["known"]
    return StepPlan(
        step,
        header["train"],
        split_rows(header["rows"], ids, lengths, n_microbatches, known, context),
        header["seq_len"],
        header["codec"],
        seed,
        None if header["next"] is None else tuple(header["next"]),
        frozen,
        header["loss_scale"],
        header["dense"],
        header["measure"],
    )


def split_rows(
    rows: int,
    ids: list[int] | None,
    lengths: list[int] | None,
    n_microbatches: int,
    known: str | None = None,
    context: Mapping[str, Tensor] | None = None,
) -> tuple[MicroBatch, ...]:
    """The micro-batches into which torch cuts a batch (as ``torch.tensor_split`` does)."""
    base, extra = divmod(rows, n_microbatches)
    found, at = [], 0
    for k in range(n_microbatches):
        size = base + (k < extra)
        cut = slice(at, at + size)
        found.append(
            MicroBatch(
                size,
                None if ids is None else tuple(ids[cut]),
                None if lengths is None else tuple(lengths[cut]),
                known is not None and "0" not in known[cut],
                {name: tensor[cut] for name, tensor in (context or {}).items()},
            )
        )
        at += size
    return tuple(found)
