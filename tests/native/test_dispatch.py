"""Which kernels code a tensor; and codecs, scheme and operators by way of Triton, end to end.

As a script it prints where Triton's way and the eager twin's differ, on CUDA or, where there is no
device, under Triton's interpreter, which the test starts in a process of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.codecs.common import normal
from tests.native.interpreter import run_under_the_interpreter
from tests.schemes.links import mixed_step, visit, visits_of
from thinwire.codecs import codec
from thinwire.codecs.keeping import KEEPINGS
from thinwire.native import (
    IntegerFormat,
    kernels,
    kernels_for,
    library,
    triton_kernels,
    triton_launch,
    triton_use,
)
from thinwire.schemes import Visit, scheme

FORMAT = IntegerFormat(4, 128, False, False, False)
ROTATED = dataclasses.replace(FORMAT, hadamard=True)
CODECS = [
    "int1",
    "int2:round=stochastic",
    "int3:scale=std,symmetric",
    "int4",
    "int4:zstd",
    "int4:hadamard",  # which Triton leaves to the twin
    "int5:symmetric,group=row",
    "int8:group=100",
]


# What is coded, by name: the tensor, and options of encode and decode.


def inputs() -> dict[str, tuple[Tensor, dict[str, Any]]]:
    padded = normal(4, 300)
    padded[1:, 260:] = torch.nan
    seeds = torch.arange(3) * 2**33 - 1
    return {
        "a scalar": (normal(), {}),
        "no rows": (torch.zeros(0, 5), {}),
        "no values": (torch.zeros(5, 0), {}),
        "three dimensions": (normal(2, 3, 90), {}),
        "bfloat16": (normal(2, 260).bfloat16(), {"seed": 7}),
        "float16 at its limit": ((normal(2, 260) * 30000).clamp(-65504, 65504).half(), {}),
        "float64": (normal(2, 130).double(), {}),
        "apart": (normal(3, 2, 260)[:, 1], {"seed": seeds}),
        "rows that are not contiguous": (normal(300, 3).t(), {"seed": seeds}),
        "lengths": (padded, {"lengths": [300, 0, 1, 256], "seed": -1}),
        "no length": (padded, {"lengths": [0, 0, 0, 0]}),
        "rows": (normal(5, 7, 20), {"rows": 4, "seed": 3}),
        "of many magnitudes": (normal(2, 300) * torch.logspace(-42, 37, 300), {}),
    }


def outcome(call: Callable[[], object]) -> object:
    """What is returned, tensors as bytes; or the error that is raised, in words."""
    try:
        return plain(call())
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


def plain(found: Any) -> object:
    if isinstance(found, Tensor):
        data = found.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return str(found.dtype), tuple(found.shape), data.numpy().tobytes()
    if isinstance(found, (list, tuple)):
        return [plain(part) for part in found]
    return found


def both(call: Callable[[], object], device: str) -> bool:
    """Whether ``call`` comes to the same by way of Triton and of the eager twin."""
    triton = library.forced(library.TRITON) if device == "cpu" else contextlib.nullcontext()
    with triton:
        found = outcome(call)
    with library.forced(library.EAGER):
        return found == outcome(call)


def coding(spec: str, x: Tensor, options: dict[str, Any]) -> Callable[[], object]:
    """Everything that a codec does with ``x``: with and without room, in one piece and strided."""
    c = codec(spec)

    def call() -> object:
        size = c.max_nbytes(x.shape, x.dtype, options.get("rows"))
        room, apart = x.new_full((2, size + 9), 171, dtype=torch.uint8).unbind()
        apart = apart.repeat_interleave(2)[::2]
        encoded = [c.encode(x, **options, out=out) for out in (None, room, apart)]
        there = {key: value for key, value in options.items() if key != "seed"}
        y = x.new_full((*x.shape, 2), torch.nan)[..., 0]
        decoded = [c.decode(encoded[0], x.shape, x.dtype, **there, out=out) for out in (None, y)]
        return [*encoded, room, apart, *decoded, y]

    return call


def codecs(device: str) -> Iterator[str]:
    for number, spec in enumerate(CODECS):
        for name, (x, options) in itertools.islice(inputs().items(), number % 3, None, 3):
            if not both(coding(spec, x.to(device), options), device):
                yield f"{spec}: {name}"


def errors(device: str) -> Iterator[str]:
    for spec in CODECS[::3]:
        c = codec(spec)
        for bad in (torch.nan, torch.inf, -torch.inf):
            x = normal(3, 300, device=device)
            x[1, 290], x[2, 5], x[0, 299] = bad, torch.nan, torch.nan
            for lengths in (None, [299, 300, 300]):
                if not both(partial(c.encode, x, lengths=lengths), device):
                    yield f"{spec}: {bad} with lengths {lengths}"
        far = normal(3, 300, device=device)
        far[1, 7], far[1, 8] = 3.1e38, -3.1e38
        if not both(partial(c.encode, far), device):
            yield f"{spec}: a range beyond float32"
        payload = c.encode(normal(3, 300, device=device)).clone()
        payload[1] = payload[-1] = 0xFF
        for found in (payload, payload[1:]):
            if not both(partial(c.decode, found, (3, 300), torch.float32), device):
                yield f"{spec}: a bad payload of {found.numel()} bytes"


def changing(
    spec: str, x: Tensor, lengths: list[int] | None, in_place: bool
) -> Callable[[], object]:
    """The AQ-SGD step at both ends."""
    c, sizes = codec(spec), lengths or [x.shape[1]] * len(x)

    def call() -> object:
        ends = []
        for _ in range(2):
            m = normal(*x.shape, seed=1, device=x.device)
            before = [row[:size] for row, size in zip(m, sizes, strict=True)]
            ends.append((before, before if in_place else [torch.zeros_like(r) for r in before]))
        room = x.new_full((c.max_nbytes(x.shape, x.dtype) + 9,), 171, dtype=torch.uint8)
        payload, energies = c.encode_change(x, lengths, 5, *ends[0], KEEPINGS["fp32"], room)
        y = torch.full_like(x, torch.nan, memory_format=torch.contiguous_format)
        c.decode_change(payload, lengths, *ends[1], KEEPINGS["fp32"], y)
        return [payload, room, energies, ends[0][1], ends[1][1], y]

    return call


def changes(device: str) -> Iterator[str]:
    near = normal(3, 520, seed=1) + normal(3, 520, seed=2) * 0.1
    tensors = [
        near,
        near.bfloat16(),
        near.half(),
        near.double(),
        near.t().contiguous().t(),
        near[:, :259] * 1e5,  # float16's limit is exceeded
        torch.where(near > 2, torch.nan, near),
    ]
    for number, spec in enumerate(CODECS):
        for index, x in itertools.islice(enumerate(tensors), number % 2, None, 2):
            lengths = None if (index + number) // 2 % 2 else [x.shape[1], 0, 257]
            in_place = (index + number) // 2 % 3 == 0
            if not both(changing(spec, x.to(device), lengths, in_place), device):
                yield f"{spec}: change {index}"


def stepping(spec: str, device: str) -> Callable[[], object]:
    """Mixed steps of a scheme from end to end, the last of which fails."""

    def call() -> object:
        made = scheme(spec)
        sender, receiver = made.sender(), made.receiver()
        found: list[object] = []
        for number in range(6):
            step = mixed_step(number)
            visits = visits_of(number, step)
            sender.begin_step(visits)
            receiver.begin_step(visits)
            for k, (there, x) in enumerate(zip(visits, step[1], strict=True)):
                sections = sender.encode(x.to(device), k, there)
                found += [[s.kind.name, s.codec, s.rows, s.versions, s.payload] for s in sections]
                found.append(receiver.decode(sections, k, there))
            found.append([sender.digest(), receiver.digest()])

        def payloads(x: Tensor, there: Visit) -> list[Tensor]:
            return [section.payload for section in sender.encode(x, 0, there)]

        there = visit((1, 2), (96, 50))
        for value in (0.5, 3.2e38, 3.38e38, 3.4028e38, -torch.inf):
            x = torch.full((2, 96), 0.1, device=device)
            x[0, 40:50], x[1, 3:] = value, -value
            sender.begin_step([there])
            found.append(outcome(partial(payloads, x, there)))
            found.append(sender.digest())
        return found

    return call


def schemes(device: str) -> Iterator[str]:
    for spec in (
        "delta(int4)",
        "delta(int2:round=stochastic,first=int4)",
        "delta(int3,first=bf16)",
    ):
        if not both(stepping(spec, device), device):
            yield spec


def operators(device: str) -> Iterator[str]:
    x, m = normal(3, 300, device=device), normal(3, 300, seed=1, device=device)

    def call() -> object:
        sent, received = m.clone(), m.clone()
        payload = torch.ops.thinwire.delta_encode(x, sent, "int4", 1)
        return [payload, torch.ops.thinwire.delta_decode(payload, received, "int4"), sent, received]

    if not both(call, device):
        yield "operators"


def differences(device: str) -> Iterator[str]:
    """All in which Triton's way differs from the eager twin's."""
    launched: list[str] = []
    launch = triton_launch.launch

    def counted(name: str, *arguments: Any, **named: Any) -> None:
        launched.append(name)
        launch(name, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_launch, "launch", counted)
        for check in (codecs, errors, changes, schemes, operators):
            launched.clear()
            yield from check(device)
            if not launched:
                yield f"{check.__name__}: Triton has no part in it"
    if problem := triton_use._try(torch.device(device)):
        yield f"a trial: {problem}"


def test_every_way_through_triton_equals_the_eager_twin_under_the_interpreter():
    run_under_the_interpreter(__file__)


@pytest.mark.gpu
@pytest.mark.timeout(600)  # some hundred programs to compile
def test_every_way_through_triton_equals_the_eager_twin_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: torch.cuda.is_available() is false")
    if reason := triton_use.why_not(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip(reason)
    assert list(differences("cuda")) == []


# The choice, without running anything.


def on_a_gpu(dtype: torch.dtype = torch.float32, numel: int = 6) -> Tensor:
    """A tensor that says that it is on a GPU."""
    with FakeTensorMode():
        return torch.empty((2, numel // 2), dtype=dtype, device="cuda")


@pytest.fixture
def triton_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_use, "_available", lambda device: True)


@pytest.mark.skipif(library.why_missing() != "", reason="no library")
def test_on_the_cpu_the_compiled_kernels_code_what_they_know_and_the_twin_the_rest():
    x = torch.zeros(2, 3)
    assert kernels_for(x, FORMAT) is kernels
    assert kernels_for(x, ROTATED) is kernels
    assert kernels_for(x.double(), FORMAT) is None
    with library.forced(library.EAGER):
        assert kernels_for(x, FORMAT) is None


@pytest.mark.usefixtures("triton_there")
def test_on_a_gpu_triton_codes_what_it_knows_and_the_twin_the_rest():
    assert kernels_for(on_a_gpu(), FORMAT) is triton_kernels
    assert kernels_for(on_a_gpu(torch.bfloat16), FORMAT) is triton_kernels
    assert kernels_for(on_a_gpu(torch.float64), FORMAT) is None
    assert kernels_for(on_a_gpu(), ROTATED) is None
    assert kernels_for(on_a_gpu(numel=2**30), FORMAT) is None  # positions are int32


@pytest.mark.usefixtures("triton_there")
def test_forcing_the_twin_switches_triton_off_and_a_level_of_the_cpu_does_not():
    with library.forced(library.EAGER):
        assert kernels_for(on_a_gpu(), FORMAT) is None
    for level in library.levels():
        with library.forced(level):
            assert kernels_for(on_a_gpu(), FORMAT) is triton_kernels


def test_forcing_triton_on_the_cpu_without_its_interpreter_fails(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with library.forced(library.TRITON), pytest.raises(AssertionError, match="TRITON_INTERPRET=1"):
        codec("int4").encode(torch.zeros(3))


def test_a_tensor_on_another_device_is_left_to_the_twin():
    assert kernels_for(torch.empty(2, 3, device="meta"), FORMAT) is None


@pytest.mark.parametrize(
    ("missing", "interpreted", "capability", "said"),
    [
        ("Triton is not installed", False, (9, 0), "Triton is not installed"),
        ("", True, (9, 0), "Triton's interpreter, .* takes tensors on the CPU"),
        ("", False, (7, 5), "Triton does not support GeForce"),
        ("", False, (9, 0), "Triton fails: RuntimeError: Python.h is not here"),
    ],
)
def test_where_triton_does_not_serve_a_gpu_the_twin_does_and_one_line_says_why(
    monkeypatch, caplog, missing, interpreted, capability, said
):
    def fail(_: torch.device) -> str:
        raise RuntimeError("Python.h\nis not here")

    monkeypatch.setattr(triton_use, "why_missing", lambda: missing)
    monkeypatch.setattr(triton_use, "interpreted", lambda: interpreted)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GeForce")
    monkeypatch.setattr(triton_use, "_try", fail)
    for cached in (triton_use.why_not, triton_use._available):
        monkeypatch.setattr(triton_use, cached.__name__, functools.cache(cached.__wrapped__))
    assert [kernels_for(on_a_gpu(), FORMAT) for _ in range(2)] == [None, None]
    [record] = caplog.records
    assert re.search(said, record.getMessage())
    assert "codecs run on the slower torch twin, with the same bytes" in record.getMessage()


def test_on_the_cpu_triton_is_not_imported():
    code = (
        "import sys, torch, thinwire as tw; c = tw.codec('int4'); x = torch.zeros(2, 300);"
        "c.decode(c.encode(x), x.shape, x.dtype); c.decode(c.encode(x.double()), x.shape, x.dtype);"
        "print('triton' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False\n"


if __name__ == "__main__":
    for line in differences("cuda" if torch.cuda.is_available() else "cpu"):
        print(line)
