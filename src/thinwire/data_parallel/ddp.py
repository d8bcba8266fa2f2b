"""``compress_ddp``: a communication hook for DistributedDataParallel.

1. A bucket's gradients are coded and sent as soon as torch has them, in parts; parts that came
   before go a round on meanwhile. All of it in the thread that calls the hook, in the order of the
   buckets, so that nothing waits for what another rank has not begun.
2. With the last bucket all are waited for, and the means are written into torch's buckets.
3. Where a gradient of any rank is not finite, all ranks find NaN in all of that step's gradients
   and ``skipped`` in the state; residuals are what they were.

Residuals go by parameter, since torch forms its buckets anew after the first step. Memory is that
of the exchange; means are held until the last bucket is done.
"""

# without "from __future__ import annotations": torch reads a hook's annotations, and wants types
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.data_parallel.averager import Averager, Averages
from thinwire.data_parallel.reducer import (
    DEFAULT,
    check_seed,
    flat,
    named_parameters,
    peers_of,
    put_into,
)
from thinwire.exchange import Exchange, exchange
from thinwire.network import Transport


class CompressedDDP(Averages):
    """The state of one model's hook. ``skipped``: whether the last step's gradients were not
    finite on some rank."""

    def __init__(
        self,
        averager: Averager,
        parameters: list[tuple[str, torch.nn.Parameter]],
        scale: Callable[[], float],
    ) -> None:
        super().__init__(averager)
        self._scale_of = scale
        self._number = {id(parameter): n for n, (_, parameter) in enumerate(parameters)}
        self._waiting: list[tuple[GradBucket, Future[Tensor]]] = []
        self._gradients: dict[int, Tensor] = {}  # those of torch's buckets, by number
        self._begun = 0  # buckets of ours
        self._scale = 1.0
        self._failed: str | None = None

    def hook(self, bucket: GradBucket) -> Future[Tensor]:
        """What torch calls with each bucket, in their order."""
        if self._failed is not None:
            raise RuntimeError(
                f"an earlier step failed, and its gradients are lost: {self._failed}"
            )
        future: Future[Tensor] = Future()
        try:
            with self._averager.peers.shared():
                self._take(bucket, future)
        except BaseException as error:
            self._failed = str(error)
            raise
        return future

    def _take(self, bucket: GradBucket, future: Future[Tensor]) -> None:
        averager = self._averager
        if not self._waiting:
            averager.begin()
            self._gradients, self._begun = {}, 0
            self._scale = float(self._scale_of())
        self._waiting.append((bucket, future))
        if bucket.buffer().is_sparse:
            raise ValueError(
                "a sparse gradient: torch gives hooks no means to average it; use "
                "tw.GradientReducer, or Embedding(sparse=False)"
            )
        numbers = [self._number[id(parameter)] for parameter in bucket.parameters()]
        found = dict(zip(numbers, bucket.gradients(), strict=True))
        self._gradients |= found
        for part in averager.split(numbers):  # torch's are larger than what is best under way
            averager.add(self._begun, part, [flat(found[n], self._scale) for n in part])
            self._begun += 1
        if bucket.is_last():
            self._finish()

    def _finish(self) -> None:
        found = self._averager.finish()
        self._averager.settle(found.finite)
        self.skipped = not found.finite
        waiting, self._waiting = self._waiting, []
        for number, gradient in self._gradients.items():
            put_into(gradient, found.means[number] if found.finite else None, self._scale)
        self._gradients = {}
        for bucket, future in waiting:
            future.set_result(bucket.buffer())


def compress_ddp(
    ddp: DistributedDataParallel,
    spec: str | Exchange = DEFAULT,
    *,
    scaler: torch.amp.GradScaler | None = None,
    seed: int = 0,
    deadline: float = 300.0,
    transport: Transport | None = None,
) -> CompressedDDP:
    """Have ``ddp`` average gradients in few bits, over the ranks of its process group.

    spec: what travels, see docs/data-parallel.md. scaler: the one that scales the loss, if one
    does; residuals are then kept without the scale. The others are those of ``GradientReducer``.
    Save the returned state's ``state_dict`` on each rank beside the model's. Collective. Raises
    ValueError where a hook is registered already, and on all ranks alike where models differ.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise ValueError(
            f"compress_ddp takes a DistributedDataParallel, not {type(ddp).__name__}; FSDP2 has "
            "tw.compress_fsdp, anything else tw.GradientReducer"
        )
    ignored = set(getattr(ddp, "parameters_to_ignore", ()))
    parameters = named_parameters(
        (name, p) for name, p in ddp.module.named_parameters() if name not in ignored
    )
    chosen = exchange(spec)
    check_seed(seed)
    peers = peers_of(ddp.process_group, transport, deadline)
    averager = Averager(parameters, peers, chosen, seed)
    state = CompressedDDP(
        averager, parameters, (lambda: 1.0) if scaler is None else scaler.get_scale
    )
    try:
        ddp.register_comm_hook(state, CompressedDDP.hook)
    except RuntimeError as error:
        peers.close()
        if "once" not in str(error):
            raise
        raise ValueError(
            "this DistributedDataParallel has a communication hook already, and torch takes one; "
            "wrap the module anew"
        ) from None
    return state
