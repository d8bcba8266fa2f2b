"""``LocalSteps``: replicas train by themselves, and average what they have learned now and then
(DiLoCo: Douillard et al. 2023, algorithm 1; local SGD where the outer step is plain).

Every N steps d <- parameters of the last exchange - parameters, averaged over the replicas; the
outer optimizer, SGD with Nesterov momentum, moves the parameters of the last exchange along d, and
all replicas go on from there.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.data_parallel.averager import Averager, counted, digest_of, work_dtype
from thinwire.data_parallel.reducer import (
    DEFAULT,
    Named,
    check_seed,
    flat,
    named_parameters,
    peers_of,
)
from thinwire.exchange import Exchange, exchange
from thinwire.network import Transport


class LocalSteps:
    """Call ``step`` after each step of the inner optimizer; every ``every`` th exchanges.

    lr, momentum, nesterov: of the outer step (the defaults are DiLoCo's); ``lr=1, momentum=0`` is
    local SGD, and what to take for a small ``every``. It holds two copies of the parameters, in
    float32 or float64, beside what the exchange holds. The others are those of ``GradientReducer``.
    All ranks must start from the same parameters, which is compared. Collective.
    """

    def __init__(
        self,
        params: Named,
        every: int,
        group: dist.ProcessGroup | None = None,
        spec: str | Exchange = DEFAULT,
        *,
        lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
        seed: int = 0,
        deadline: float = 300.0,
        transport: Transport | None = None,
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r}: exchange after 1 step or more")
        if not lr > 0 or not 0 <= momentum < 1:
            raise ValueError(f"an outer step with lr={lr} and momentum={momentum} does not learn")
        named = named_parameters(params)
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._every, self._lr, self._momentum, self._nesterov = every, lr, momentum, nesterov
        chosen = exchange(spec)
        check_seed(seed)
        self.peers = peers_of(group, transport, deadline)
        self._averager = Averager(
            named,
            self.peers,
            chosen,
            seed,
            settings={
                "every": every,
                "lr": lr,
                "momentum": momentum,
                "nesterov": nesterov,
                "parameters": digest_of(self._parameters),
            },
        )
        self._averager.form()
        self._anchors = [_wide(p) for p in self._parameters]
        self._buffers = [torch.zeros_like(a) for a in self._anchors]
        self._steps = 0
        self.skipped = False

    @torch.no_grad()
    def step(self) -> bool:
        """Count a step of the inner optimizer; returns whether there was an exchange.

        Where parameters of any rank are not finite, all ranks go back to those of the last
        exchange, and find ``skipped``.
        """
        self._steps += 1
        if self._steps % self._every:
            return False
        with self.peers.shared():
            self._exchange()
        return True

    def _exchange(self) -> None:
        found = self._averager.average(
            lambda n: flat(self._anchors[n] - _wide(self._parameters[n]))
        )
        self._averager.settle(found.finite)
        self.skipped = not found.finite
        for number, mean in enumerate(found.means):
            if found.finite and mean is not None:
                self._move(number, mean)
            self._parameters[number].copy_(self._anchors[number])

    def _move(self, number: int, mean: Tensor) -> None:
        anchor, buffer = self._anchors[number], self._buffers[number]
        mean = mean.view(anchor.shape)
        buffer.mul_(self._momentum).add_(mean)
        change = mean + buffer * self._momentum if self._nesterov else buffer
        anchor.sub_(change * self._lr)

    def state_dict(self) -> dict[str, Tensor]:
        """All that this rank remembers, as plain tensors by name."""
        found = {f"exchange.{k}": v for k, v in self._averager.state_dict().items()}
        for name, anchor, buffer in zip(self._names, self._anchors, self._buffers, strict=True):
            found[f"anchor.{name}"] = anchor.clone()
            found[f"momentum.{name}"] = buffer.clone()
        return found | {"steps": torch.tensor(self._steps)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from this rank's ``state_dict``. Raises ValueError, with nothing changed, where it
        does not fit."""
        steps = counted(state, "steps")
        own = {"steps"}
        for name, anchor in zip(self._names, self._anchors, strict=True):
            for what in (f"anchor.{name}", f"momentum.{name}"):
                own.add(what)
                if what not in state or state[what].shape != anchor.shape:
                    raise ValueError(f"the state has no {what!r} of shape {tuple(anchor.shape)}")
                if state[what].dtype != anchor.dtype or not state[what].isfinite().all():
                    raise ValueError(f"{what!r} holds no finite numbers of {anchor.dtype}")
        unknown = [k for k in state if k not in own and not k.startswith("exchange.")]
        if unknown:
            raise ValueError(f"the state has {unknown[0]!r}, of which LocalSteps knows nothing")
        inner = {
            k.removeprefix("exchange."): v for k, v in state.items() if k.startswith("exchange.")
        }
        self._averager.load_state_dict(inner)
        for name, anchor, buffer in zip(self._names, self._anchors, self._buffers, strict=True):
            anchor.copy_(state[f"anchor.{name}"])
            buffer.copy_(state[f"momentum.{name}"])
        self._steps = steps

    def report(self) -> dict[str, object]:
        """What this rank has sent, as plain numbers; see docs/data-parallel.md."""
        return self._averager.report()

    def close(self) -> None:
        """Release the transport."""
        self.peers.close()


def _wide(parameter: Tensor) -> Tensor:
    return parameter.detach().to(work_dtype(parameter.dtype), copy=True)
