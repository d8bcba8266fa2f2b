"""``thinwire selftest``: whether this machine computes the very bytes that all others compute.

Codecs and schemes run on data that is itself free of ISA differences, at every level of the
kernels that the machine has, on the eager twin, and on CUDA where there is a device: by Triton's
kernels and by the twin. Under TRITON_INTERPRET=1 Triton's run on the CPU. Hashes of
payloads, decoded values and references are compared with those below. A change of one of these is
a change of the wire format. All of them anew: ``python -m tests.native.digest``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from thinwire.codecs import codec
from thinwire.native import library, triton_use
from thinwire.schemes import Visit, scheme
from thinwire.train.parser import Parser

#: Codec to the start of a SHA-256.
CODECS = {
    "raw": "15d1e971716c8bdf",
    "bf16": "a6e866e2dce0fb70",
    "fp16": "8611c25e6dfb6158",
    "fp8": "2e1442076cd6a0d3",
    "int1": "879d6af201ee6c8d",
    "int2": "0ea04fc4537fa63f",
    "int3": "1a2a8d781bfb6f28",
    "int4": "3628de8d50b3a53b",
    "int5": "ae2a9fb233ba5fc9",
    "int6": "50d52a52a2baf501",
    "int7": "12b6be48cf145639",
    "int8": "bd8560bd40cabb47",
    "int1:symmetric": "827966b4e57ca9c6",
    "int2:symmetric": "9539cd5af523c9f5",
    "int3:symmetric": "18f6d7a5be4da382",
    "int4:symmetric": "ccdf2b1973d71099",
    "int5:symmetric": "ed86efa111049830",
    "int6:symmetric": "7dff8a2595272cd7",
    "int7:symmetric": "1af1b94cd426c8e3",
    "int8:symmetric": "55a94cea23490ccf",
    "int1:round=stochastic": "bd5ec7dbc5b775b0",
    "int2:round=stochastic": "96651d13791a9413",
    "int3:round=stochastic": "525c25a5cb64d65b",
    "int8:round=stochastic": "e22864a399c2fdb4",
    "int4:round=stochastic,symmetric": "f66bb731b81bbc1e",
    "int3:scale=std": "13b2695f06c19cca",
    "int4:scale=std,symmetric": "6cdc70e140702118",
    "int8:scale=std,group=100": "bdef4932a940ae14",
    "int2:scale=range": "5f47855ea205e413",
    "int4:group=row": "b68edd6ed19446a6",
    "int2:group=8": "e1a87960ff733fae",
    "int4:hadamard": "e02a6c2bb7d38cb1",
    "int2:hadamard": "6c77f9c814f757f1",
    "int8:hadamard,group=100": "15205cded109cccb",
    "int4:zstd": "55a840d77c0446c2",
    "tile": "8ff4b5e9affea392",
    "tile:bits=3": "5b880888e32787f3",
    "tile:bits=8": "1eecf3019bae702c",
    "topk:0.1": "def7006da40bc1c9",
    "topk:0.01": "f2c883b2cd67e079",
    "topk:0.3": "b507da020b514574",
    "topk:0.1/int8": "2f68ea9440da38a0",
}
#: Scheme to the same.
SCHEMES = {
    "delta(int4)": "abfa38aed27c157f",
    "delta(int2,first=int4,ref=fp32)": "0f53513393efdd18",
    "delta(int3:round=stochastic,ref=bf16)": "aad21a985ad7da52",
    "delta(topk:0.1,first=int6,ref=int4)": "4ca357c050eaad40",
    "delta(int8:symmetric,first=fp16)": "b5e04c45e8235f45",
}

SPECS = list(CODECS)
_WHAT_TO_DO = "report this, and do not train this machine together with others"


def integers(n: int, seed: int) -> Tensor:
    """Pseudo-random int64 in [-2**23, 2**23): one step of a linear congruential generator."""
    h = (torch.arange(n, dtype=torch.int64) + seed * 7919) * 1103515245 + 12345
    h = (h ^ (h >> 13)) * 69069 & 0xFFFFFFFF
    return (h >> 8) - 2**23


def bell(rows: int, n: int, seed: int = 0) -> Tensor:
    """[rows, n] float32 integers of up to 2**26, bell-shaped."""
    sums = torch.stack([integers(rows * n, seed + k) for k in range(8)]).sum(0)
    return sums.to(torch.float32).view(rows, n)


def cases() -> list[Tensor]:
    """Inputs built from integers by exact or single float32 operations."""
    x = bell(6, 421)
    signs = integers(4 * 300, 9).view(4, 300)
    zeros = torch.where(signs > 0, 0.0, -0.0).to(torch.float32)
    return [
        x * 2.0**-24,
        x * 2.0**-24 + 1000,
        x * x * x * 2.0**-66,
        x * 2.0**70,
        x * 2.0**-149,  # mostly subnormal
        x.to(torch.bfloat16)[:3],
        zeros,  # both signs
        torch.where(signs % 3 == 0, signs, 0).to(torch.float32) * zeros.sign().add(1),
        torch.full((3, 130), 2.0**-9, dtype=torch.float32),
        x[:1, :1] * 2.0**-24,
    ]


def codec_digest(spec: str, device: torch.device | str = "cpu") -> str:
    """A hash of the payloads and decoded values of all cases."""
    c, total = codec(spec), hashlib.sha256()
    for index, x in enumerate(cases()):
        if spec == "fp16" and float(x.abs().max()) > 65504:
            continue
        payload = c.encode(x.to(device), seed=index * 2**33 + 5)
        if not getattr(c, "zstd", False):  # whose frames depend on the library's version
            total.update(_bytes(payload))
        total.update(_bytes(c.decode(payload, x.shape, x.dtype)))
    return total.hexdigest()[:16]


def scheme_digest(spec: str, device: torch.device | str = "cpu") -> str:
    """A hash of some steps from end to end: sections, received values, and both ends' state.

    Samples are met for the first time, again, and twice in a step; one shrinks to nearly nothing.
    """
    made, total = scheme(spec), hashlib.sha256()
    sender, receiver = made.sender(), made.receiver()
    for step in range(6):
        visits, inputs = _step(step)
        sender.begin_step(visits)
        receiver.begin_step(visits)
        for microbatch, (visit, x) in enumerate(zip(visits, inputs, strict=True)):
            sections = sender.encode(x.to(device), microbatch, visit)
            for section in sections:
                facts = section.kind.name, section.codec, section.rows, section.versions
                total.update(repr(facts).encode())
                total.update(_bytes(section.payload))
            total.update(_bytes(receiver.decode(sections, microbatch, visit)))
        total.update(f"{sender.digest():x} {receiver.digest():x}".encode())
    return total.hexdigest()[:16]


def _step(step: int) -> tuple[list[Visit], list[Tensor]]:
    """The visits and inputs of two micro-batches."""
    width = 421
    visits, inputs = [], []
    for microbatch in range(2):
        keys = (7 * microbatch, 3, 5 + step % 2)
        x = bell(3, width, 50 + microbatch) * 2.0**-24
        x = x + bell(3, width, 100 * (step + 1) + microbatch) * 2.0**-27
        if step == 3:
            x[0] *= 2.0**-10
        lengths = (width, width, 300 if step > 3 else width)
        seeds = torch.arange(3, dtype=torch.int64) + 2**33 * (2 * step + microbatch)
        visits.append(Visit(keys, lengths, seeds, padded=step > 3))
        inputs.append(x)
    return visits, inputs


def _bytes(x: Tensor) -> bytes:
    return x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


@dataclasses.dataclass(frozen=True)
class Result:
    """What one codec or scheme gave at one level: a hash, or the error that it raised."""

    level: str
    kind: str
    spec: str
    found: str
    expected: str

    @property
    def ok(self) -> bool:
        return self.found == self.expected


#: The eager twin on a CUDA device.
CUDA = "cuda"


def levels() -> list[str]:
    """What can be tested here."""
    triton = [] if why_no_triton() else [library.TRITON]
    cuda = [CUDA] if torch.cuda.is_available() else []
    return [*library.levels(), library.EAGER, *triton, *cuda]


def why_no_triton() -> str:
    """One line that says why Triton's kernels cannot be tested here; empty if they can."""
    if triton_use.interpreted():
        return ""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    return triton_use.why_not(_cuda())


def _cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _where(level: str) -> tuple[torch.device, contextlib.AbstractContextManager[None]]:
    """The device on which a level is tested, and what makes it the level in use."""
    if level == CUDA:
        return _cuda(), library.forced(library.EAGER)
    if level == library.TRITON and not triton_use.interpreted():
        return _cuda(), contextlib.nullcontext()
    return torch.device("cpu"), library.forced(level)


def check(level: str) -> Iterator[Result]:
    """Every codec and scheme at one of ``levels()``."""
    device, in_use = _where(level)
    with in_use:
        for spec, expected in CODECS.items():
            yield Result(level, "codec", spec, _found(codec_digest, spec, device), expected)
        for spec, expected in SCHEMES.items():
            yield Result(level, "scheme", spec, _found(scheme_digest, spec, device), expected)


def _found(digest: Callable[[str, torch.device], str], spec: str, device: torch.device) -> str:
    try:
        return digest(spec, device)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"


def run(arguments: Sequence[str]) -> int:
    """Run ``thinwire selftest`` with these words; returns its exit code. Raises ConfigError."""
    parser = Parser(
        prog="thinwire selftest",
        description="Check that the codecs and schemes give the same bytes here as elsewhere.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    options = parser.parse_args(arguments)
    results: list[Result] = []
    if library.why_missing() and not options.json:
        print(f"{'kernels':<10} not here: {library.why_missing()}")
    if why_no_triton() and not options.json:
        print(f"{library.TRITON:<10} not tested: {why_no_triton()}")
    for level in levels():
        part = list(check(level))
        results += part
        if not options.json:
            print(_line(level, part), flush=True)
    wrong = [result for result in results if not result.ok]
    if options.json:
        print(json.dumps(_document(results), indent=1))
    if wrong:
        print(f"thinwire: error: {_complaint(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def _line(level: str, part: list[Result]) -> str:
    counted = f"{len(CODECS)} codecs, {len(SCHEMES)} schemes"
    wrong = sum(not result.ok for result in part)
    return f"{level:<12} {counted}  {f'{wrong} WRONG' if wrong else 'ok'}"


def _complaint(wrong: list[Result]) -> str:
    first = wrong[0]
    others = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return (
        f"{first.kind} {first.spec} at level {first.level} gives {first.found}, "
        f"not {first.expected}{others}: {_WHAT_TO_DO}"
    )


def _document(results: list[Result]) -> dict[str, object]:
    return {
        "ok": all(result.ok for result in results),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "why_no_kernels": library.why_missing() or None,
        "why_no_triton": why_no_triton() or None,
        "results": [{**dataclasses.asdict(r), "ok": r.ok} for r in results],
    }
