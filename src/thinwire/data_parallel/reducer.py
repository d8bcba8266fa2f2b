"""``GradientReducer``: gradients averaged over replicas once the step's backward passes are done.

A call after the schedule's step is right under every schedule, also those that split the backward
pass, which DDP's and FSDP2's hooks miss; see docs/data-parallel.md.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thinwire.codecs.base import saturated
from thinwire.data_parallel.averager import BUCKET, Averager, Averages
from thinwire.exchange import Exchange, Peers, exchange
from thinwire.network import GlooTransport, Transport

DEFAULT = "ef(int4:symmetric)"
Named = Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]]


class GradientReducer(Averages):
    """Averages the gradients of ``params`` over the ranks of ``group``, in few bits.

    params: parameters, or pairs of a name and a parameter as ``named_parameters`` gives them (names
    make states of a checkpoint readable); those that need no gradient are left out. The same on all
    ranks. group: None for the default one. spec: what travels, see docs/data-parallel.md. seed: of
    stochastic rounding. bucket: values that are averaged in one go. deadline: seconds that a
    message may take. transport: whose endpoints are the ranks; None makes a gloo group of its own.

    Creating one is collective in the group. Raises ValueError on all ranks alike where they were
    given different tensors, SpecError on a spec that is none.
    """

    def __init__(
        self,
        params: Named,
        group: dist.ProcessGroup | None = None,
        spec: str | Exchange = DEFAULT,
        *,
        seed: int = 0,
        bucket: int = BUCKET,
        deadline: float = 300.0,
        transport: Transport | None = None,
    ) -> None:
        self.exchange = exchange(spec)
        check_seed(seed)
        named = named_parameters(params)
        self._parameters = [parameter for _, parameter in named]
        self.peers = peers_of(group, transport, deadline)
        parts = [(name, local(p)) for name, p in named]
        super().__init__(Averager(parts, self.peers, self.exchange, seed, bucket))
        self._averager.form()

    @property
    def size(self) -> int:
        """The number of replicas."""
        return self.peers.size

    def abort(self, kind: str, why: str) -> None:
        """Tell the other ranks that this one gives up: the error's name, and its text."""
        self.peers.abort(kind, why)

    def reduce(self, scale: float = 1.0) -> bool:
        """Replace every gradient by its mean over the ranks; returns whether the step is skipped.

        It is where a gradient of any rank is not finite, or not in the codec's range: then all
        ranks find NaN in every gradient of that bucket and True here, and residuals are what they
        were; leave the optimizer's step out (``torch.amp.GradScaler`` does). ``scale``: what the
        loss was multiplied by, the same on all ranks; residuals are kept without it. A gradient
        that no rank has stays None; one that a rank lacks counts as zero there. Raises LinkError
        where a rank is gone, PeerAborted with its reason where one gave up.
        """
        counts = self.average(scale)
        self.settle(counts)
        return self.skipped

    def average(self, scale: float = 1.0) -> bool:
        """``reduce`` without its end: whether the gradients were finite on all ranks of the group.
        Residuals wait for ``settle``."""
        if not 0 < scale < float("inf"):
            raise ValueError(f"scale={scale}: a loss is multiplied by a positive number")
        parameters = self._parameters
        with self.peers.shared():
            found = self._averager.average(lambda n: flat(parameters[n].grad, scale))
            for parameter, mean, here in zip(parameters, found.means, found.present, strict=True):
                if here:
                    put(parameter, mean, scale)
        return found.finite

    def settle(self, counts: bool) -> None:
        """The step counts; or it does not, and residuals are what they were before it."""
        self._averager.settle(counts)
        self.skipped = not counts


def named_parameters(params: Named) -> list[tuple[str, nn.Parameter]]:
    """``params`` with a name each, each parameter once, without those that need no gradient."""
    if isinstance(params, nn.Module):
        raise ValueError("give module.named_parameters(), not the module")
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for number, one in enumerate(params):
        name, parameter = one if isinstance(one, tuple) else (str(number), one)
        if not isinstance(parameter, nn.Parameter):
            raise ValueError(f"{name!r} is a {type(parameter).__name__}, not a parameter")
        if parameter.requires_grad:
            found.setdefault(id(parameter), (name, parameter))
    if not found:
        raise ValueError("there is no parameter that needs a gradient")
    return list(found.values())


def check_seed(seed: int) -> None:
    """Raise ValueError where it is none."""
    if not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        raise ValueError(f"seed={seed!r} is no whole number from 0 on, below 2^63")


def peers_of(
    group: dist.ProcessGroup | None, transport: Transport | None, deadline: float
) -> Peers:
    """This rank among those of ``group``, over a transport of their own."""
    if not 0 < deadline < 1e9:
        raise ValueError(f"deadline={deadline} is no number of seconds")
    if transport is None:
        if not dist.is_initialized():
            raise ValueError("call torch.distributed.init_process_group first, or give a transport")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ValueError(
                f"group is {group!r}, not a process group that this rank is in; "
                "a mesh has get_group()"
            )
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        transport = GlooTransport(ranks=ranks)
    return Peers(transport, deadline=deadline)


def local(x: Tensor) -> Tensor:
    """This rank's part of a tensor that FSDP2 has sharded; any other is all here."""
    return x.to_local() if isinstance(x, DTensor) else x


def flat(grad: Tensor | None, scale: float = 1.0) -> Tensor | None:
    """A gradient as 1-D, in the order of its indices, without what the loss was multiplied by."""
    if grad is None:
        return None
    grad = local(grad)
    if grad.is_sparse:
        grad = grad.to_dense()
    flattened = grad.detach().contiguous().view(-1)
    if scale == 1.0:
        return flattened
    # a loss scale may be beyond what fp16 holds; by a power of two this loses nothing
    return flattened.to(torch.promote_types(flattened.dtype, torch.float32)) / scale


@torch.no_grad()
def put(parameter: nn.Parameter, mean: Tensor | None, scale: float = 1.0) -> None:
    """Make ``mean`` (None: NaN) the gradient, in place where there is one."""
    grad, sparse = parameter.grad, parameter.grad is not None and parameter.grad.is_sparse
    if isinstance(parameter, DTensor):
        if grad is None:
            grad = parameter.grad = torch.empty_like(parameter)
        put_into(local(grad), mean, scale)
        return
    if grad is None or sparse:
        grad = torch.empty_like(parameter)
    put_into(grad, mean, scale)
    # what an optimizer for sparse gradients takes: the rows that are not zero
    parameter.grad = grad.to_sparse(1) if sparse else grad


@torch.no_grad()
def put_into(grad: Tensor, mean: Tensor | None, scale: float = 1.0) -> None:
    """Write 1-D ``mean``, times ``scale``, or NaN, into a dense gradient."""
    if mean is None:
        grad.fill_(torch.nan)
        return
    value = mean if scale == 1.0 else mean * scale
    grad.copy_(saturated(value, grad.dtype).view(grad.shape))
