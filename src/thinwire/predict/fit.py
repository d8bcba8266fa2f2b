"""The map from what both ends know of a position to what is left of its value, by least squares.

Fitted at the sending end alone, in any arithmetic, to what both ends have decoded, of late more;
the other end is sent the nearest exact ``Map`` whenever what was sent since makes it small.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from thinwire.predict.exact import Map

_MEMORY = 0.95  # of a step, when the next comes
_RIDGE = 1e-3  # of the mean square of a source
_FEWEST = 10  # steps between two maps
_SHARE = 64  # a map is sent after so many times its bytes
#: About as many positions of a message are fitted to.
SAMPLED = 64


class Fit:
    """Sums over what was decoded; nothing at first."""

    def __init__(self) -> None:
        self._inner = self._outer = torch.zeros(0, 0)
        self._steps = self._sent = 0

    def sent(self, nbytes: int) -> None:
        """So many bytes were sent in a step that counts."""
        self._sent += nbytes

    def add(self, source: Tensor, target: Tensor) -> None:
        """A step has shown ``target`` [n, outputs] at ``source`` [n, inputs], float32."""
        if self._outer.shape != (source.shape[1], target.shape[1]):
            self.forget()
            self._inner = source.new_zeros(source.shape[1], source.shape[1])
            self._outer = source.new_zeros(source.shape[1], target.shape[1])
        self._inner.mul_(_MEMORY).addmm_(source.T, source)
        self._outer.mul_(_MEMORY).addmm_(source.T, target)
        self._steps += 1

    def due(self) -> Map | None:
        """The map of what was seen so far, where it is time to send one."""
        size = Map.nbytes(*self._outer.shape)
        if self._steps < _FEWEST or self._sent < _SHARE * size:
            return None
        self._steps = self._sent = 0
        inner = self._inner.double()
        ridge = _RIDGE * inner.diagonal().mean().clamp(min=1e-30)
        inner.diagonal().add_(ridge)
        weights, info = torch.linalg.solve_ex(inner, self._outer.double())
        if int(info) or not bool(torch.isfinite(weights).all()):
            return None
        return Map.of(weights)

    def forget(self) -> None:
        """Begin anew."""
        self.__init__()  # type: ignore[misc]

    def state_dict(self) -> dict[str, Tensor]:
        """What ``load_state_dict`` restores."""
        counts = torch.tensor([self._steps, self._sent])
        return {"inner": self._inner, "outer": self._outer, "counts": counts}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises KeyError, TypeError or ValueError where it is another's."""
        inner, outer, counts = state["inner"].clone(), state["outer"].clone(), state["counts"]
        if inner.dim() != 2 or outer.shape != inner.shape or len(inner) != inner.shape[1]:
            raise ValueError("the saved sums are of other sizes")
        floats = inner.dtype == outer.dtype == torch.float32
        if not floats or not bool(torch.isfinite(inner).all() & torch.isfinite(outer).all()):
            raise ValueError("the saved sums are none")
        if counts.dtype != torch.int64 or counts.shape != (2,) or bool((counts < 0).any()):
            raise ValueError("the saved counts are none")
        self._steps, self._sent = counts.tolist()
        self._inner, self._outer = inner, outer
