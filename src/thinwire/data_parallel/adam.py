"""Adam whose exchange is compressed: after a warm-up, its momentum travels, not its gradient.

The variance of Adam is no linear function of gradients, so errors of compressed ones would not
cancel in it. In ``warmup`` steps gradients are averaged exactly, and both moments move; after them
the variance, with its bias correction, stays what it is (at least a hundredth of its tensor's
mean), each rank moves the momentum by its own gradient, and the momentum is averaged in few bits
with error feedback at both ends:

* Tang et al. 2021, "1-bit Adam", algorithm 1, with ``ef(sign)``;
* the data-parallel half of AQ-SGD (Wang et al. 2022), in 4 to 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.data_parallel.averager import Averager, counted, digest_of, work_dtype
from thinwire.data_parallel.reducer import DEFAULT, check_seed, flat, peers_of
from thinwire.exchange import Exchange, exchange
from thinwire.exchange.lowrank import total
from thinwire.exchange.requantized import EXACT
from thinwire.network import Transport

#: Of a tensor's mean: what saw next to no gradient in the warm-up would have the errors of coding
#: divided by next to nothing for the rest of the run.
_LEAST_VARIANCE = 0.01


class QuantizedAdam(Optimizer):
    """AdamW over replicas, which must not average gradients in any other way.

    params: parameters, or groups of them, as torch's optimizers take them; the same on all ranks.
    lr, betas, eps, weight_decay (decoupled): AdamW's. warmup: steps before compression; the
    variance is frozen at the end of it, so it should be past the learning rate's own warm-up.
    spec: what the momentum travels in. The others are those of ``GradientReducer``. Collective.

    ``skipped`` says whether the last step was left out since a gradient was not finite on some
    rank: then parameters and all state are what they were. A parameter without a gradient on this
    rank counts as one of zeros.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        warmup: int,
        group: dist.ProcessGroup | None = None,
        spec: str | Exchange = DEFAULT,
        seed: int = 0,
        deadline: float = 300.0,
        transport: Transport | None = None,
    ) -> None:
        if not lr >= 0 or not eps > 0 or not weight_decay >= 0:
            raise ValueError(f"lr={lr}, eps={eps}, weight_decay={weight_decay}: none is negative")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas} are not within 0 … 1, without 1")
        if not isinstance(warmup, int) or warmup < 1:
            raise ValueError(f"warmup={warmup!r}: the variance needs one exact step at least")
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.warmup, self.skipped = warmup, False
        self._all: list[nn.Parameter] = [
            p for one in self.param_groups for p in one["params"] if p.requires_grad
        ]
        if not self._all:
            raise ValueError("there is no parameter that needs a gradient")
        chosen = exchange(spec)
        check_seed(seed)
        self.peers = peers_of(group, transport, deadline)
        named = [(str(number), p.detach()) for number, p in enumerate(self._all)]
        settings = {"warmup": warmup, "parameters": digest_of(self._all)}
        settings |= {"lr, betas, eps or weight decay": [lr, *betas, eps, weight_decay]}
        self._exact = Averager(named, self.peers, EXACT, seed, settings=settings)
        self._compressed = Averager(named, self.peers, chosen, seed)
        self._compressed.form()
        self._steps = 0
        self._complete = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: ranks have agreed on what they exchange."""
        if getattr(self, "_complete", False):
            raise ValueError("give all parameters when the optimizer is made; make a new one")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange, and move the parameters; collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self.peers.shared():
            frozen = self._steps >= self.warmup
            means = self._averaged(frozen)
        self.skipped = means is None
        if means is not None:
            self._steps += 1
            self._move(means, frozen)
        return loss

    def _averaged(self, frozen: bool) -> list[Tensor] | None:
        """The mean of the momenta (before: of the gradients) over the ranks."""
        averager = self._compressed if frozen else self._exact
        groups = self._groups()
        found = averager.average(lambda n: self._sent(self._all[n], groups[n] if frozen else None))
        averager.settle(found.finite)
        if not found.finite:
            return None
        every = zip(self._all, found.means, strict=True)
        return [mean.view(p.shape) for p, mean in every if mean is not None]

    def _sent(self, parameter: nn.Parameter, group: dict[str, Any] | None) -> Tensor:
        """What is averaged of a parameter: its momentum in ``group``, or its gradient."""
        grad = flat(parameter.grad)
        if grad is None:
            grad = torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
        if group is None:
            return grad
        beta = group["betas"][0]
        momentum = flat(self._moments(parameter)[0])
        assert momentum is not None
        moved: Tensor = momentum * beta + grad.to(momentum.dtype) * (1 - beta)
        return moved

    def _groups(self) -> list[dict[str, Any]]:
        """The group of each parameter."""
        found = {id(p): one for one in self.param_groups for p in one["params"]}
        return [found[id(p)] for p in self._all]

    def _moments(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
        state = self.state[parameter]
        if not state:
            wide = work_dtype(parameter.dtype)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=wide)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=wide)
        return state["exp_avg"], state["exp_avg_sq"]

    def _move(self, means: list[Tensor], frozen: bool) -> None:
        for parameter, mean, one in zip(self._all, means, self._groups(), strict=True):
            beta, gamma = one["betas"]
            momentum, variance = self._moments(parameter)
            if frozen:
                momentum.copy_(mean)
            else:
                momentum.mul_(beta).add_(mean * (1 - beta))
                variance.mul_(gamma).add_(mean * mean * (1 - gamma))
            if self._steps == self.warmup:
                least = total(variance.flatten()) / max(variance.numel(), 1) * _LEAST_VARIANCE
                torch.maximum(variance, least, out=variance)
            root = (variance / (1 - gamma ** min(self._steps, self.warmup))).sqrt_()
            change = momentum / (1 - beta**self._steps) / root.add_(one["eps"])
            value = parameter.to(momentum.dtype) * (1 - one["lr"] * one["weight_decay"])
            parameter.copy_(value - change * one["lr"])

    def state_dict(self) -> dict[str, Any]:
        """torch's, and under ``exchange`` what this rank remembers of coding, as plain tensors."""
        found = super().state_dict()
        found["exchange"] = {
            "steps": torch.tensor(self._steps),
            **{f"exact.{k}": v for k, v in self._exact.state_dict().items()},
            **{f"compressed.{k}": v for k, v in self._compressed.state_dict().items()},
        }
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from this rank's ``state_dict``. Raises ValueError where it does not fit."""
        state = dict(state_dict)
        own = state.pop("exchange", None)
        if not isinstance(own, Mapping):
            raise ValueError("the state has no 'exchange': it is of another optimizer")
        steps = counted(own, "steps")
        ready = []
        for name, averager in (("compressed.", self._compressed), ("exact.", self._exact)):
            part = {k.removeprefix(name): v for k, v in own.items() if k.startswith(name)}
            ready.append((averager, averager.prepared(part)))
        moments = self._checked(state.get("state", {}), steps)
        super().load_state_dict(state)
        for parameter, found in moments.items():  # torch casts them to the parameters' dtype
            self.state[parameter] = {what: x.clone() for what, x in found.items()}
        for averager, prepared in ready:
            averager.adopt(prepared)
        self._steps = steps

    def _checked(
        self, state: Mapping[int, Any], steps: int
    ) -> dict[nn.Parameter, dict[str, Tensor]]:
        """The moments of each parameter that a state has. Raises ValueError where they do not
        fit."""
        every = [p for one in self.param_groups for p in one["params"]]
        found = {}
        for number, parameter in enumerate(every):
            if not parameter.requires_grad or not steps:
                continue
            moments = state.get(number, {})
            like = torch.Size(parameter.shape), work_dtype(parameter.dtype)
            for what in ("exp_avg", "exp_avg_sq"):
                x = moments.get(what)
                if not isinstance(x, Tensor) or (x.shape, x.dtype) != like:
                    raise ValueError(
                        f"the state has no {what!r} of parameter {number}, "
                        f"{list(like[0])} of {like[1]}"
                    )
            found[parameter] = {what: moments[what].to(parameter.device) for what in moments}
        return found

    def report(self) -> dict[str, Any]:
        """What this rank has sent, as plain numbers; see docs/data-parallel.md."""
        return self._compressed.report()

    def close(self) -> None:
        """Release the transport."""
        self.peers.close()


class OneBitAdam(QuantizedAdam):
    """``QuantizedAdam`` in one bit: the sign of each value of the momentum, and a scale for 128."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, **options: Any) -> None:
        super().__init__(params, lr, **({"spec": "ef(sign)"} | options))
