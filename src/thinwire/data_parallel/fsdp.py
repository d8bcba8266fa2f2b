"""``compress_fsdp``: FSDP2's reduce-scatter of gradients, and if wanted its all-gather of
parameters, in few bits.

Each rank holds a part of every parameter, and residuals of all of it would undo that: by default
there are none, and rounding is stochastic, so that what is lost has no mean. ``ef(…)`` is there for
those who have the memory; it says how much that takes. Where ranks of one machine hold the parts
and machines are replicas (HSDP), let FSDP2 have the mesh of one machine, and average over the
machines with ``GradientReducer``, which takes the parts as they are: residuals are of parts then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from thinwire.codecs import Codec, codec
from thinwire.data_parallel.averager import counted, seed_of
from thinwire.data_parallel.reducer import check_seed, peers_of
from thinwire.errors import SpecError
from thinwire.exchange import Exchange, Peers, Requantized, exchange
from thinwire.exchange.base import RESIDUALS
from thinwire.exchange.scatter import Scatter, gather
from thinwire.network import Transport

DEFAULT = "int4:symmetric,round=stochastic"


class CompressedFSDP:
    """The state of one model's reduce-scatters. ``skipped``: whether gradients of the last backward
    pass were not finite on some rank; all of them are NaN then in the modules that they belong to,
    on all ranks."""

    def __init__(
        self, peers: Peers, coder: Codec, kept: torch.dtype | None, seed: int, modules: int
    ) -> None:
        self._modules = modules
        self.peers, self.coder, self._kept, self._seed = peers, coder, kept, seed
        self._scatters: dict[int, Scatter] = {}
        self._calls = 0
        self._done: set[int] = set()
        self._finite = True

    @property
    def skipped(self) -> bool:
        return not self._finite

    def seed(self, what: int) -> int:
        """Of one message's rounding."""
        return seed_of(self._seed, self._calls, self.peers.rank, what)

    def sum(self, number: int, parts: Tensor) -> Tensor | None:
        """The sum of this rank's row of ``parts``, for the module of this number."""
        if not self._done or number in self._done:  # another backward pass
            self.settle()
            self._finite = True
        with self.peers.shared():
            self.peers.begin_step()
            self._calls += 1
            scatter = self._scatters.setdefault(
                number, Scatter(self.peers, number, self.coder, self._kept)
            )
            found = scatter.sum(parts, self.seed(0))
        self._done.add(number)
        self._finite = self._finite and found is not None
        return found

    def settle(self) -> None:
        """The backward pass is over: keep its residuals, or none of them where it was not finite.
        Called by itself when the next one begins, which is where a module comes again; call it
        yourself where passes take turns between modules."""
        for scatter in self._scatters.values():
            if scatter.residual is None:
                continue
            if self._finite:
                scatter.residual.commit()
            else:
                scatter.residual.discard()
        self._done = set()

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's residuals, and the number of calls, which rounding depends on."""
        self.settle()
        found = {"calls": torch.tensor(self._calls)}
        for number, scatter in self._scatters.items():
            if scatter.residual is not None:
                found[f"worker.{number}"] = torch.stack(scatter.residual.buffers)
        return found

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from this rank's ``state_dict``. Raises ValueError where it does not fit."""
        calls = counted(state, "calls")
        rows = {name: x for name, x in state.items() if name != "calls"}
        for name, x in rows.items():
            kind, _, number = name.partition(".")
            if kind != "worker" or not number.isdigit() or self._kept is None:
                raise ValueError(f"the state has {name!r}, of which {self.coder} knows nothing")
            if int(number) >= self._modules:
                raise ValueError(f"the state has {name!r}, and there are {self._modules} modules")
            fits = x.dim() == 2 and len(x) == self.peers.size and x.is_floating_point()
            if not fits or not bool(torch.isfinite(x.to(self._kept)).all()):
                raise ValueError(f"{name!r} is no residual for {self.peers.size} ranks")
        self._calls, self._scatters, self._done = calls, {}, set()
        for name, x in rows.items():
            at = int(name.partition(".")[2])
            scatter = Scatter(self.peers, at, self.coder, self._kept)
            scatter.restore(x)
            self._scatters[at] = scatter

    def report(self) -> dict[str, Any]:
        """What this rank has sent, as plain numbers; see docs/data-parallel.md."""
        return self.peers.counters.report()

    def close(self) -> None:
        """Release the transport; the model cannot be trained on afterwards."""
        self.peers.close()


class _Allocates:
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class _ReduceScatter(_Allocates, ReduceScatter):
    def __init__(self, state: CompressedFSDP, number: int) -> None:
        self._state, self._number = state, number

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        peers = self._state.peers
        _check_group(peers, group)
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"FSDP2 asks for {op}; leave set_gradient_divide_factor out")
        total = self._state.sum(self._number, input_tensor.view(peers.size, -1))
        if total is None:
            output_tensor.fill_(torch.nan)
            return None
        output_tensor.copy_(total.div_(peers.size) if op == dist.ReduceOp.AVG else total)
        return None


class _AllGather(_Allocates, AllGather):
    def __init__(self, state: CompressedFSDP, number: int, coder: Codec) -> None:
        self._state, self._number, self._coder = state, number, coder

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        peers = self._state.peers
        _check_group(peers, group)
        with peers.shared():
            peers.begin_step()
            found = gather(peers, self._number, self._coder, input_tensor, self._state.seed(1))
        output_tensor.copy_(found)
        return None


def _check_group(peers: Peers, group: dist.ProcessGroup) -> None:
    if group.size() != peers.size or group.rank() != peers.rank:
        raise ValueError(
            f"FSDP2 shards over {group.size()} ranks, compress_fsdp was given a group of "
            f"{peers.size}: give it the mesh's, as mesh.get_group()"
        )


def compress_fsdp(
    module: nn.Module,
    spec: str | Exchange = DEFAULT,
    group: dist.ProcessGroup | None = None,
    *,
    params: str | None = None,
    seed: int = 0,
    deadline: float = 300.0,
    transport: Transport | None = None,
) -> CompressedFSDP:
    """Have every FSDP2 module within ``module`` reduce its gradients in few bits.

    spec: a codec, or ``ef(codec)`` with a residual of 4 or 2 bytes a value of the whole model on
    each rank. group: that of the mesh which the modules are sharded over; None: the default one.
    params: a codec for the all-gather of parameters, as ``bf16``; None leaves it to torch. The
    others are those of ``GradientReducer``. Collective. Raises ValueError where no module is
    FSDP2's, and SpecError on an exchange that needs whole matrices or all of a model.
    """
    modules = [one for one in module.modules() if isinstance(one, FSDPModule)]
    if not modules:
        raise ValueError("no module here is FSDP2's: call torch.distributed.fsdp.fully_shard first")
    chosen = exchange(spec)
    if not isinstance(chosen, Requantized):
        raise SpecError(
            f"{chosen} does not scatter gradients: give FSDP2 the mesh of one machine, and average "
            "over the machines with tw.GradientReducer, or take a codec such as int4:symmetric"
        )
    check_seed(seed)
    coder = None if params is None else codec(params)
    kept = (RESIDUALS[chosen.residual] or torch.float32) if chosen.residual else None
    state = CompressedFSDP(
        peers_of(group, transport, deadline), chosen.codec, kept, seed, len(modules)
    )
    for number, one in enumerate(modules):
        one.set_custom_reduce_scatter(_ReduceScatter(state, number))
        if coder is not None:
            one.set_custom_all_gather(_AllGather(state, number, coder))
    if kept is not None and state.peers.rank == 0:
        values = sum(p.numel() for p in module.parameters())
        print(
            f"thinwire: {chosen} keeps {values * kept.itemsize / 1e6:.0f} MB of residuals on each "
            "rank, as much as the unsharded model; a codec with round=stochastic keeps none"
        )
    return state
