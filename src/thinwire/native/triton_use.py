"""Whether Triton's kernels serve a tensor, and if not, why.

They need an NVIDIA GPU, Triton, and the C compiler that Triton needs.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import os
import shutil

import torch
from torch import Tensor

from thinwire.native import library, noise, reference, triton_kernels
from thinwire.native.reference import IntegerFormat
from thinwire.native.tensors import DTYPES

#: Older ones flush subnormals in div_rn and sqrt_rn (triton-lang/triton#8557).
MINIMUM_TRITON = (3, 6)
#: The compute capability from which Triton supports NVIDIA's GPUs.
_OLDEST_GPU = (8, 0)
#: Positions in a row are int32 in the programs, with room for what is added to them.
_MOST_VALUES = 2**30

_logger = logging.getLogger(__name__)


@functools.cache
def why_missing() -> str:
    """One line that says why Triton does not serve here, and what to do; empty if it does."""
    try:
        found = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "Triton is not installed: pip install triton"
    if tuple(int(part) for part in found.split(".")[:2]) < MINIMUM_TRITON:
        least = ".".join(map(str, MINIMUM_TRITON))
        return f"Triton {found} is too old: install {least} or newer"
    if torch.version.cuda is None:
        return "torch has no CUDA, and on other GPUs the arithmetic is unchecked"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton finds no C compiler: install gcc or clang, or name one in CC"
    return ""


def interpreted() -> bool:
    """Whether Triton runs programs in its interpreter, on the CPU, as TRITON_INTERPRET=1 asks."""
    if not os.environ.get("TRITON_INTERPRET") or importlib.util.find_spec("triton") is None:
        return False
    from triton import knobs  # type: ignore[import-untyped, import-not-found, unused-ignore]

    return bool(knobs.runtime.interpret)


@functools.cache
def why_not(device: torch.device) -> str:
    """``why_missing`` for a CUDA device, on which a tensor is tried for the purpose."""
    reason = why_missing()
    if reason:
        return reason
    if interpreted():
        return "Triton's interpreter, which TRITON_INTERPRET asks for, takes tensors on the CPU"
    if torch.cuda.get_device_capability(device) < _OLDEST_GPU:
        return f"Triton does not support {torch.cuda.get_device_name(device)}"
    try:
        return _try(device)
    except Exception as error:  # noqa: BLE001  compilers, headers, drivers: whatever is amiss
        return f"Triton fails: {' '.join(f'{type(error).__name__}: {error}'.split())}"


def _try(device: torch.device) -> str:
    """Code a small tensor, as the twin does; what differs, if anything does."""
    fmt = IntegerFormat(4, 128, symmetric=False, stochastic=False, std=False)
    x = noise.uniform(torch.arange(2), 1024)
    seeds = torch.zeros(2, dtype=torch.int64)
    expected = torch.empty((2, reference.row_nbytes(1024, fmt)), dtype=torch.uint8)
    reference.encode_rows(x, fmt, seeds, expected)
    out, y = torch.empty_like(expected, device=device), torch.empty_like(x, device=device)
    coded = triton_kernels.encode(x.to(device), None, fmt, seeds.to(device), out) < 0
    same = coded and triton_kernels.decode(out, None, fmt, y) and torch.equal(out.cpu(), expected)
    values = reference.decode_rows(expected, 1024, fmt)
    if not (same and values is not None and torch.equal(y.cpu(), values)):
        return "its bytes are not those of the torch twin: report this, with your GPU and Triton"
    return ""


@functools.cache
def _available(device: torch.device) -> bool:
    reason = why_not(device)
    if reason:
        _logger.warning(
            "thinwire's GPU kernels are not there (%s): "
            "codecs run on the slower torch twin, with the same bytes",
            reason,
        )
    return not reason


def usable(x: Tensor, fmt: IntegerFormat) -> bool:
    """Whether the kernels are there and take ``x``'s device, dtype and size, and the format.

    They do not rotate: formats with ``hadamard`` are left to the eager twin. Tensors on the CPU are
    taken where ``library.forced`` says so, by the interpreter.
    """
    fits = x.dtype in DTYPES and x.numel() < _MOST_VALUES and not fmt.hadamard
    if x.device.type == "cuda":
        return fits and library.instead() != library.EAGER and _available(x.device)
    if x.device.type != "cpu" or library.instead() != library.TRITON:
        return False
    assert interpreted(), "without TRITON_INTERPRET=1, Triton's programs do not run on the CPU"
    return fits
