"""The suite finds what it is there to find: each requirement fails for a codec that is wrong in
this alone, and none fails for those that are built in or in the documentation."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import thinwire as tw
from tests.blocks import block, loaded
from tests.codecs.common import ALL
from thinwire.codecs import codec
from thinwire.contract import requirement
from thinwire.contract.requirement import Result
from thinwire.contract.suite import OF_CODECS, examine

BUILT_IN = [*ALL, "int6:hadamard,group=100", "tile:bits=3", "topk:0.3", "threshold:2/tile"]


@pytest.mark.parametrize("spec", BUILT_IN)
def test_built_in_codecs_do_all_that_is_asked(spec: str) -> None:
    report = examine(spec)
    failed = [result for result in report.results if result.status == "failed"]
    assert failed == []
    left_out = {r.requirement for r in report.results if r.status == "not applicable"}
    allowed = {"rows"} if codec(spec).together else {"nonfinite"} if spec == "raw" else set()
    assert left_out - {"device"} == allowed


def test_of_a_codec_that_needs_another_links_frames_the_string_alone_is_checked() -> None:
    results = examine("topk:0.1,mask=shared").results
    assert [r.requirement for r in results if r.status == "passed"] == ["spec"]
    assert {r.status for r in results[1:]} == {"not applicable"}


def test_a_sign_codec_is_twelve_lines() -> None:
    assert len([line for line in block("plugins.md", "sign").splitlines() if line]) <= 12


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("spec", ["sign", "grid:bits=8", "above:share=0.3", "halve:keep=5"])
def test_codecs_of_the_documentation_do_all_that_is_asked(spec: str, tmp_path: Path) -> None:
    loaded(spec.partition(":")[0], tmp_path)
    assert [r for r in examine(spec).results if r.status == "failed"] == []


@dataclasses.dataclass(frozen=True)
class Right(tw.Codec):
    """Float32 as it is, with all that is asked of a codec."""

    def row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        return 4 * n

    def _encode_rows(self, x: Tensor, seeds: Tensor, out: Tensor) -> bool:
        values = x.to(torch.float32).clone(memory_format=torch.contiguous_format)
        out.copy_(values.view(torch.uint8))
        return bool(torch.isfinite(values).all())

    def _decode_rows(self, payload: Tensor, n: int, dtype: torch.dtype) -> Tensor | None:
        return payload.clone(memory_format=torch.contiguous_format).view(torch.float32)


class WithByte(Right):
    """A byte more in each row."""

    def row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        return 4 * n + 1 if n else 0

    def byte(self, x: Tensor, seeds: Tensor) -> Tensor | int:
        return 0

    def _encode_rows(self, x: Tensor, seeds: Tensor, out: Tensor) -> bool:
        if x.shape[1]:
            out[:, -1] = self.byte(x, seeds)
        return super()._encode_rows(x, seeds, out[:, : 4 * x.shape[1]])

    def _decode_rows(self, payload: Tensor, n: int, dtype: torch.dtype) -> Tensor | None:
        return super()._decode_rows(payload[:, : 4 * n], n, dtype)


class WrongSpec(Right):
    """Doubles an option each time that it is made."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", 2 * self.scale)


class WrongShapes(Right):
    """Knows no tensors without dimensions."""

    def encode(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        x[0:1]
        return super().encode(x, *args, **options)


class WrongDtypes(Right):
    """Decodes to float32 whatever is asked for."""

    def decode(self, *args: Any, **options: Any) -> Tensor:
        return super().decode(*args, **options).float()


class WrongNonfinite(Right):
    """Sends a NaN as if it were a number."""

    def _encode_rows(self, x: Tensor, seeds: Tensor, out: Tensor) -> bool:
        super()._encode_rows(x, seeds, out)
        return True


class WrongIndex(Right):
    """Refuses it, and does not say where it is."""

    def encode(self, *args: Any, **options: Any) -> Tensor:
        try:
            return super().encode(*args, **options)
        except tw.NonFiniteError:
            raise tw.NonFiniteError("somewhere") from None


class WrongPayloads(WithByte):
    """Trusts a byte of what it is given."""

    def byte(self, x: Tensor, seeds: Tensor) -> int:
        return 42

    def _decode_rows(self, payload: Tensor, n: int, dtype: torch.dtype) -> Tensor | None:
        _ = {42: "all of it"}[int(payload[0, -1])]
        return super()._decode_rows(payload, n, dtype)


class WrongForEver(WithByte):
    """Waits for a byte that never comes."""

    def _decode_rows(self, payload: Tensor, n: int, dtype: torch.dtype) -> Tensor | None:
        while payload[0, -1]:
            pass
        return super()._decode_rows(payload, n, dtype)


class WrongScales(Right):
    """Overflows in float16, and does not say so."""

    def _encode_rows(self, x: Tensor, seeds: Tensor, out: Tensor) -> bool:
        finite = super()._encode_rows(x, seeds, out)
        super()._encode_rows(x.half(), seeds, out)
        return finite


class WrongDirection(Right):
    """Turns every sign round."""

    def _decode_rows(self, payload: Tensor, n: int, dtype: torch.dtype) -> Tensor | None:
        y = super()._decode_rows(payload, n, dtype)
        return None if y is None else -y


class WrongConstant(Right):
    """Divides by the range of a row."""

    def _decode_rows(self, payload: Tensor, n: int, dtype: torch.dtype) -> Tensor | None:
        y = super()._decode_rows(payload, n, dtype)
        assert y is not None
        spread = y.amax(1, keepdim=True) - y.amin(1, keepdim=True)
        return y if n == 1 else y / spread * spread


class WrongPack(Right):
    """Each has a secret of its own, which its string does not tell."""

    secret: int = dataclasses.field(init=False, compare=False, default=0)
    numbers: ClassVar[Iterator[int]] = itertools.count(1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "secret", next(self.numbers))

    def _encode_rows(self, x: Tensor, seeds: Tensor, out: Tensor) -> bool:
        return super()._encode_rows(x.to(torch.float32) + self.secret, seeds, out)

    def _decode_rows(self, payload: Tensor, n: int, dtype: torch.dtype) -> Tensor | None:
        y = super()._decode_rows(payload, n, dtype)
        assert y is not None
        return y - self.secret


class WrongAlias(Right):
    """Decodes to a view of the payload."""

    def decode(
        self,
        payload: Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        *args: Any,
        **options: Any,
    ) -> Tensor:
        y = super().decode(payload, shape, dtype, *args, **options)
        place = payload.storage_offset() % 4 or not payload.is_contiguous()
        if options or any(arg is not None for arg in args) or dtype != torch.float32 or place:
            return y
        return payload.view(torch.float32).view(tuple(shape))


class WrongRows(WithByte):
    """Says in each row how many there are."""

    def byte(self, x: Tensor, seeds: Tensor) -> int:
        return len(x)


class WrongTogether(Right):
    """Gives each row what the first has, where rows decode together."""

    def _decode_rows(self, payload: Tensor, n: int, dtype: torch.dtype) -> Tensor | None:
        y = super()._decode_rows(payload, n, dtype)
        return None if y is None else y + (y - y[:1]) * 1e-3


class WrongLengths(Right):
    """Leaves something beyond the lengths."""

    def decode(self, *args: Any, **options: Any) -> Tensor:
        y = super().decode(*args, **options)
        lengths = args[4] if len(args) > 4 else options.get("lengths")
        if lengths is not None and y.dim() == 2:
            for row, size in enumerate(lengths):
                y[row, size:] = 1
        return y


class WrongSizes(Right):
    """Takes more for a row of an odd length."""

    def row_nbytes(self, n: int, dtype: torch.dtype) -> int:
        return 4 * n + 8 * (n % 2)

    def _encode_rows(self, x: Tensor, seeds: Tensor, out: Tensor) -> bool:
        out.zero_()
        return super()._encode_rows(x, seeds, out[:, : 4 * x.shape[1]])

    def _decode_rows(self, payload: Tensor, n: int, dtype: torch.dtype) -> Tensor | None:
        return super()._decode_rows(payload[:, : 4 * n], n, dtype)


class WrongStrides(Right):
    """Reads memory as if it were contiguous."""

    def encode(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        there = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        if not x.is_contiguous() and there >= x.numel():
            x = torch.as_strided(x, (x.numel(),), (1,)).view(x.shape)
        return super().encode(x, *args, **options)


class WrongInput(Right):
    """Works in place, in half precision."""

    def encode(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        payload = super().encode(x, *args, **options)
        if x.dtype == torch.float16:
            x.detach().zero_()
        return payload


class WrongOut(Right):
    """Has a buffer of its own."""

    def encode(self, *args: Any, **options: Any) -> Tensor:
        return super().encode(*args, **options).clone()


class WrongAddress(Right):
    """Takes payloads for contiguous."""

    def decode(self, payload: Tensor, *args: Any, **options: Any) -> Tensor:
        packed = torch.as_strided(payload, payload.shape, (1,))
        return super().decode(packed, *args, **options)


class WrongRepeatable(WithByte):
    """Counts its calls, in long rows."""

    calls: ClassVar[Iterator[int]] = itertools.count()

    def byte(self, x: Tensor, seeds: Tensor) -> int:
        return next(self.calls) % 256 if x.shape[1] > 1000 else 0


class WrongGenerators(Right):
    """Draws from torch's generator."""

    def _encode_rows(self, x: Tensor, seeds: Tensor, out: Tensor) -> bool:
        torch.rand(1)
        return super()._encode_rows(x, seeds, out)


class WrongSeeds(WithByte):
    """Draws on the seeds, and does not say so."""

    def byte(self, x: Tensor, seeds: Tensor) -> Tensor:
        return seeds % 256


class WrongStochastic(Right):
    """Says that it draws on the seeds, and does not."""

    @property
    def stochastic(self) -> bool:
        return True


class WrongDelta(Right):
    """Moves what the receiver remembers in a way of its own."""

    def decode_change(self, *args: Any) -> None:
        super().decode_change(*args)
        for reference in args[3]:
            reference.view(torch.uint8)[:1] ^= 1


class WrongPipeline(Right):
    """Sends zeros."""

    def _decode_rows(self, payload: Tensor, n: int, dtype: torch.dtype) -> Tensor | None:
        return payload.new_zeros((payload.shape[0], n), dtype=torch.float32)


class WrongDevice(Right):
    """Another value on a GPU."""

    def _decode_rows(self, payload: Tensor, n: int, dtype: torch.dtype) -> Tensor | None:
        y = super()._decode_rows(payload, n, dtype)
        assert y is not None
        return y + 1 if payload.is_cuda else y


#: Of each requirement what is wrong, with the smallest input, and what was found.
WRONG: dict[type[Right], tuple[str, str, str]] = {
    WrongSpec: ("spec", "wrong:scale=2.0", "scale=4.0) is not"),
    WrongShapes: ("shapes", "float32 ()", "IndexError: "),
    WrongDtypes: ("dtypes", "bfloat16 (3, 90)", "torch.float32 (3, 90)"),
    WrongNonfinite: ("nonfinite", "float32 (1, 1) with nan at (0, 0)", "it was encoded"),
    WrongIndex: ("nonfinite", "float32 (1, 1) with nan at (0, 0)", "NonFiniteError: somewhere"),
    WrongPayloads: ("payloads", "float32 (1, 1), its payload of bytes 0", "KeyError: 0"),
    WrongForEver: ("payloads", "", "it still ran after 0.5 s"),
    WrongScales: ("scales", "float32 (2, 64) times 2^18", "values that are not finite"),
    WrongDirection: ("direction", "float32 (4, 300)", "their inner product is -"),
    WrongConstant: ("constant", "float32 (2, 2) of 0", "values that are not finite"),
    WrongPack: ("pack", "float32 (1,)", "other values than decode's"),
    WrongAlias: ("alias", "float32 (1, 8)", "the values change with the payload"),
    WrongRows: ("rows", "float32 (2, 1)", "byte 4 is another one alone"),
    WrongTogether: ("rows", "float32 (2, 1)", "row 1 decodes to other values than alone"),
    WrongLengths: ("lengths", "float32 (2, 1), lengths [0, 1]", "row 0 has values beyond its"),
    WrongSizes: ("sizes", "2 values of torch.float32", "8 by most_row_nbytes, but 12"),
    WrongStrides: ("strides", "float32 (2, 6, 5, 4), transposed", "other bytes than"),
    WrongInput: ("input", "float16 (3, 50)", "the input was changed"),
    WrongOut: ("out", "float32 (3, 50), encoded into bytes 0 and on", "the payload is elsewhere"),
    WrongAddress: ("address", "float32 (1, 8), its payload every other byte", "other values"),
    WrongRepeatable: ("repeatable", "float32 (3, 1500)", "other bytes the next time"),
    WrongGenerators: ("generators", "float32 (4, 300), seed 3", "the generator of torch has moved"),
    WrongSeeds: ("seeds", "float32 (2, 400), seed 1 and 2", "though it is not stochastic"),
    WrongStochastic: ("seeds", "float32 (2, 400), seed 1 and 2", "though it is stochastic"),
    WrongDelta: ("delta", "step 3 of delta(wrong,first=wrong,ref=fp32)", "digests"),
    WrongPipeline: ("pipeline", "forward raw, backward wrong", "stage 0 has not learned anything"),
}


def failures(cls: type[Right]) -> list[Result]:
    """What fails for a class that is registered as ``wrong``."""
    made = cls if cls is Right else dataclasses.dataclass(frozen=True)(cls)
    tw.register_codec("wrong")(made)
    return [result for result in examine("wrong").results if result.status == "failed"]


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("cls", WRONG, ids=lambda cls: cls.__name__)
def test_what_is_wrong_fails_the_requirement_that_asks_for_it_and_no_other(
    cls: type[Right], monkeypatch: pytest.MonkeyPatch
) -> None:
    if cls is WrongForEver:
        monkeypatch.setattr(requirement, "LIMIT_S", 0.5)
    name, given, found = WRONG[cls]
    (result,) = failures(cls)
    assert result.requirement == name
    assert (result.given or "").startswith(given)
    assert found in (result.found or "")
    assert result.expected


@pytest.mark.usefixtures("registry")
def test_a_codec_that_does_all_that_is_asked_fails_nothing() -> None:
    assert failures(Right) == []


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit(), BaseException("a\nb")])
def test_a_codec_that_ends_the_process_fails(error: BaseException) -> None:
    class Ending(Right):
        """Has other ideas."""

        def _decode_rows(self, payload: Tensor, n: int, dtype: torch.dtype) -> Tensor | None:
            raise error

    found = failures(Ending)
    assert len(found) > 5
    assert all(type(error).__name__ in (one.found or "") for one in found), found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.usefixtures("registry")
def test_other_values_on_a_gpu_are_found() -> None:
    assert [result.requirement for result in failures(WrongDevice)] == ["device"]


def test_each_requirement_has_a_codec_that_fails_it() -> None:
    assert {name for name, _, _ in WRONG.values()} | {"device"} == {one.name for one in OF_CODECS}
