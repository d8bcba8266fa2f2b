"""The pipeline stage: torch's own, whose neighbours are reached through our edges.

The schedule is made to believe that a neighbour behind an edge lives on this rank: its hooks for
send and receive operations return none, and inputs and output gradients are set from decoded
messages just before they are used. Only hooks without a leading underscore are overridden.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining

from thinwire.boundary import Boundary, StepPlan
from thinwire.counters import Timers
from thinwire.edge import EdgeEnd
from thinwire.pipeline.engine import check_hooks
from thinwire.pipeline.frozen import Watch


class PipelineStage(pipelining.PipelineStage):
    """A stage of a model, as ``torch.distributed.pipelining.PipelineStage``, always static.

    ``input_args`` and ``output_args`` are example tensors (meta tensors do) of one micro-batch at
    the declared maximum: its rows first, then, where sequences vary, their longest length. Float
    tensors through which gradients flow have ``requires_grad=True``. Shorter sequences and smaller
    micro-batches are fine; longer ones are refused before anything is sent.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str = "cpu",
        input_args: Tensor | tuple[Tensor, ...] = (),
        output_args: Tensor | tuple[Tensor, ...] = (),
        group: Any = None,
        **kwargs: Any,
    ) -> None:
        check_hooks()
        inputs, outputs = _tuple(input_args), _tuple(output_args)
        if not inputs or not outputs:
            raise ValueError(
                f"stage {stage_index}: input_args and output_args are needed, example tensors of "
                "one micro-batch at the largest size (torch would otherwise run the module on "
                "uninitialised memory to learn the shapes)"
            )
        super().__init__(
            submodule,
            stage_index,
            num_stages,
            torch.device(device),
            input_args=inputs,
            output_args=outputs,
            group=group,
            **kwargs,
        )
        self.inputs = _boundaries(inputs)
        self.outputs = _boundaries(outputs)
        self.previous: EdgeEnd | None = None
        self.next: EdgeEnd | None = None
        self.timers = Timers()
        #: Watches the forward of a stage that may be skipped.
        self.watch: Watch | None = None
        #: Micro-batches of the step whose output nobody will read.
        self.resting: frozenset[int] = frozenset()
        self._plan = StepPlan(0, False, ())
        self._whole: set[int] = set()  # micro-batches whose weight gradients are done already

    def begin_step(self, plan: StepPlan, following: PipelineStage | None) -> None:
        """Take the step's plan, which the edges have; ``following``: the next stage, if it is
        reached without one, and has begun the step."""
        self._plan = plan
        if self.next is not None:
            self.resting = self.next.outgoing.resting
        else:
            self.resting = frozenset() if following is None else following.resting

    # What the schedule asks for: no operations of its own where an edge is ours.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        if self.previous is None:
            return super().get_fwd_recv_ops(fwd_chunk_id)
        self.previous.incoming.post(fwd_chunk_id)
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        if self.next is None:
            return super().get_bwd_recv_ops(bwd_chunk_id)
        if self.has_backward:
            self.next.incoming.post(bwd_chunk_id)
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        if self.next is None:
            return super().get_fwd_send_ops(fwd_chunk_id)
        outputs, _ = self.fwd_cache[fwd_chunk_id]
        self.next.outgoing.send(fwd_chunk_id, outputs)
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        if self.previous is None:
            return super().get_bwd_send_ops(bwd_chunk_id)
        if self.has_backward:
            gradients = self.get_local_bwd_output(bwd_chunk_id)
            self.previous.outgoing.send(bwd_chunk_id, gradients)
        return []

    # Both neighbours in one process, joined by the memory transport: the schedule hands values
    # over directly, and they take the way through the edge all the same.

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        if self.previous is None or self.previous.peer is None:
            super().set_local_fwd_input(prev_stage_outputs, mb_index)
        else:
            self.previous.peer.outgoing.send(mb_index, _tuple(prev_stage_outputs))

    def get_local_bwd_output(self, mb_index: int) -> Any:
        # the schedule asks a V's stages for gradients in evaluation too, where torch's has none
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if not self.has_backward:
            return
        if self.next is None or self.next.peer is None:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)
        else:
            self.next.peer.outgoing.send(mb_index, next_stage_bwd_outputs)

    # Compute, on what has arrived.

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        rests = fwd_chunk_id in self.resting
        if self.previous is not None:
            # whatever comes is taken in, for the next visits
            received = self.previous.incoming.receive(fwd_chunk_id, wanted=not rests)
            if not rests:
                super().set_local_fwd_input(tuple(received), fwd_chunk_id)
        if rests:
            return self._rest(fwd_chunk_id)
        watch = self.watch if self._plan.train else None
        start = time.perf_counter()
        with contextlib.nullcontext() if watch is None else watch.running():
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.timers.compute_s += time.perf_counter() - start
        return output

    def _rest(self, chunk: int) -> tuple[Tensor, ...]:
        """Stand-ins for the outputs of a micro-batch, of their shapes, that nobody reads."""
        rows, length = self._plan.microbatches[chunk].rows, self._plan.seq_len
        outputs = tuple(
            torch.zeros((), dtype=b.dtype, device=self.device).expand(b.shape_for(rows, length))
            for b in self.outputs
        )
        self.fwd_cache[chunk] = (outputs, [])
        return outputs

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        if not self.has_backward:  # evaluation: schedules ask all the same
            return
        if self.next is not None:
            received = self.next.incoming.receive(bwd_chunk_id)
            outputs, _ = self.fwd_cache[bwd_chunk_id]
            # None would leave the gradient of an earlier micro-batch in torch's buffer
            grads = tuple(
                torch.zeros_like(output) if grad is None and boundary.requires_grad else grad
                for boundary, output, grad in zip(self.outputs, outputs, received, strict=True)
            )
            super().set_local_bwd_input(grads, bwd_chunk_id)
        whole = kwargs.get("full_backward", True)
        outputs, _ = self.fwd_cache[bwd_chunk_id]
        if not self.is_last and not any(output.requires_grad for output in outputs):
            # it is frozen, and so are all before it: there is nothing to go back through
            del self.fwd_cache[bwd_chunk_id]
            self.bwd_cache[bwd_chunk_id] = (None,) * len(self.inputs)
            if not whole:
                self._whole.add(bwd_chunk_id)
            return
        if not whole and not self.is_first and not self._splits(outputs):
            kwargs["full_backward"] = True
            self._whole.add(bwd_chunk_id)
        if self._plan.loss_scale is not None and kwargs.get("loss") is not None:
            kwargs["loss"] = kwargs["loss"] * self._plan.loss_scale
        start = time.perf_counter()
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self.timers.compute_s += time.perf_counter() - start

    def _splits(self, outputs: Sequence[Tensor]) -> bool:
        """Whether torch can split the backward pass.

        It would lose the gradients of all weights where no input has one, and walk a shared
        weight's graph twice, and fail.
        """
        inputs = any(boundary.requires_grad for boundary in self.inputs)
        return inputs and not _uses_a_parameter_twice(outputs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        if bwd_chunk_id in self._whole:
            self._whole.remove(bwd_chunk_id)
            return
        start = time.perf_counter()
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        self.timers.compute_s += time.perf_counter() - start


def _tuple(tensors: Any) -> tuple[Tensor, ...]:
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)


def _boundaries(tensors: Sequence[Tensor]) -> list[Boundary]:
    return [
        Boundary(index, tuple(t.shape), t.dtype, t.requires_grad) for index, t in enumerate(tensors)
    ]


def _uses_a_parameter_twice(outputs: Sequence[Tensor]) -> bool:
    """Whether a leaf of the outputs' autograd graph is reached on more than one edge."""
    stack = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen: set[Any] = set(stack)
    leaves: set[Any] = set()
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is None:
                continue
            if isinstance(getattr(node, "variable", None), nn.Parameter):
                if node in leaves:
                    return True
                leaves.add(node)
            elif node not in seen:
                seen.add(node)
                stack.append(node)
    return False
