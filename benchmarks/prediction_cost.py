"""What predicting costs both ends of a link, beside the computation of a step that it belongs to.

Each end of a two-stage model's link codes a step's activations and gradients, with and without
prediction; the same model computes a step. One thread, its CPU time: medians.

    python -m benchmarks.prediction_cost
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from thinwire import native
from thinwire.schemes import Foreseen, Receiver, Sender, Visit, scheme

_ROWS, _MICROBATCHES, _VOCABULARY = 4, 4, 256
#: Name, forward and backward; the first of each group is without prediction.
_PLANS = [
    [
        ("AQ-SGD, 2 bits / direct, 4 bits", "delta(int2)", "int4"),
        ("by tables", "delta(int2,by=token+previous)", "predicted(int4,by=target+token)"),
        (
            "by tables and maps",
            "delta(int2,by=token+previous+drift)",
            "predicted(int4,by=target+token+activation)",
        ),
    ],
    [
        ("tile / direct, 8 bits", "tile", "int8"),
        ("forward by tables", "predicted(tile,by=token+previous)", "int8"),
    ],
]


def cpu_ms(work: Callable[[int], None], times: int) -> float:
    """Median over steps, after a few that do not count."""
    found = []
    for number in range(times + 3):
        start = time.thread_time()
        work(number)
        found.append(1e3 * (time.thread_time() - start))
    return statistics.median(found[3:])


def compute_ms(width: int, blocks: int, positions: int, steps: int) -> float:
    """Forward and backward of a GPT with ``blocks`` blocks, ``_ROWS`` samples at a time."""
    made = [
        nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, batch_first=True)
        for _ in range(blocks)
    ]
    model = nn.Sequential(nn.Embedding(_VOCABULARY, width), *made, nn.Linear(width, _VOCABULARY))
    tokens = torch.randint(_VOCABULARY, (_ROWS, positions))

    def work(number: int) -> None:
        for _ in range(_MICROBATCHES):
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()

    return cpu_ms(work, steps)


class Link:
    """Both ends of a link, in the state that they are in after the first epoch."""

    def __init__(self, forward: str, backward: str, width: int, positions: int) -> None:
        self._ends = [
            (scheme(spec).sender(), scheme(spec).receiver()) for spec in (forward, backward)
        ]
        for ahead, back in zip(self._ends[0], reversed(self._ends[1]), strict=True):
            if scheme(backward).by_activations:
                back.activations, ahead.keeps = ahead, True
        shape = _ROWS * _MICROBATCHES, positions, width
        self._x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        self._drift = 0.2 * torch.randn(shape, generator=torch.Generator().manual_seed(2))
        self._payload = memoryview(bytearray(4 * self._x.numel()))
        self._tokens = torch.randint(_VOCABULARY, shape[:2])
        rows = torch.arange(shape[0]).split(_ROWS)
        self._visits = [
            Visit(
                tuple(part.tolist()),
                (positions * width,) * _ROWS,
                torch.zeros(_ROWS, dtype=torch.int64),
                False,
                {"token": self._tokens[part], "target": self._tokens[part]},
            )
            for part in rows
        ]

    def step(self, number: int) -> None:
        """A step's messages, both ways."""
        dtype = self._x.dtype
        values = (self._x + number % 7 * self._drift).split(_ROWS)
        gradients = self._x.split(_ROWS)
        for (sender, receiver), tensors in zip(self._ends, (values, gradients), strict=True):
            sender.begin_step(self._visits)
            receiver.begin_step(self._visits)
            shape = tuple(tensors[0].shape)
            ways = [
                (sender.foresee(k, visit, shape, dtype), receiver.foresee(k, visit, shape, dtype))
                for k, visit in enumerate(self._visits)
            ]
            for k, (visit, tensor) in enumerate(zip(self._visits, tensors, strict=True)):
                self._message(sender, receiver, ways[k], k, visit, tensor)
        for sender, receiver in self._ends:
            sender.end_step()
            receiver.end_step()

    def _message(
        self,
        sender: Sender,
        receiver: Receiver,
        ways: tuple[Foreseen | None, Foreseen | None],
        k: int,
        visit: Visit,
        x: torch.Tensor,
    ) -> None:
        """One message, by the way that a link takes."""
        ahead, back = ways
        if ahead is not None and back is not None:
            payload = native.address(self._payload)
            if ahead.encode(x.data_ptr(), payload):
                y = torch.empty_like(x)
                assert back.decode(payload, y.data_ptr())
                return
        receiver.decode(sender.encode(x, k, visit), k, visit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for width, blocks, positions in ((128, 4, 128), (768, 12, 128)):
        steps = given.steps if width < 500 else max(3, given.steps // 10)
        compute = compute_ms(width, blocks, positions, steps)
        print(
            f"width {width}, {blocks} blocks, {_MICROBATCHES} x {_ROWS} x {positions} positions: "
            f"compute {compute:.0f} ms a step",
            flush=True,
        )
        for plans in _PLANS:
            plain = 0.0
            for name, forward, backward in plans:
                link = Link(forward, backward, width, positions)
                found = cpu_ms(link.step, steps)
                plain = plain or found
                print(
                    f"  {name}: {found:6.2f} ms, {100 * found / compute:5.2f} % of it; "
                    f"prediction {100 * (found - plain) / compute:5.2f} %",
                    flush=True,
                )


if __name__ == "__main__":
    main()
