"""The codecs as torch operators, which ``torch.compile`` and ``torch.export`` pass through.

``torch.ops.thinwire.encode(x, codec, seed)`` gives the payload of ``x``, ``decode(payload, codec,
shape, dtype)`` the tensor behind it, for codecs whose size depends on the shape alone.
``delta_encode`` and ``delta_decode`` are the two halves of the AQ-SGD step on references ``m``
[rows, n] float32, which they move in place. Gradients do not flow through them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.codecs.base import Codec
from thinwire.codecs.keeping import KEEPINGS
from thinwire.spec import parse

_KEEPING = KEEPINGS["fp32"]
_LIBRARY = torch.library.Library("thinwire", "DEF")
_SCHEMAS = (
    "encode(Tensor x, str codec, int seed=0) -> Tensor",
    "decode(Tensor payload, str codec, SymInt[] shape, ScalarType dtype) -> Tensor",
    "delta_encode(Tensor x, Tensor(a!) m, str codec, int seed=0) -> Tensor",
    "delta_decode(Tensor payload, Tensor(a!) m, str codec) -> Tensor",
)


@functools.lru_cache(maxsize=256)
def _codec(spec: str) -> Codec:
    found = parse(spec)
    if not isinstance(found, Codec) or not found.fixed_size:
        raise ValueError(f"an operator takes a codec whose payload has a fixed size, not {spec!r}")
    return found


def encode(x: Tensor, codec: str, seed: int = 0) -> Tensor:
    return _codec(codec).encode(x, seed=seed)


def decode(payload: Tensor, codec: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return _codec(codec).decode(payload, shape, dtype)


def delta_encode(x: Tensor, m: Tensor, codec: str, seed: int = 0) -> Tensor:
    rows, after = _moving(m)
    payload, _ = _codec(codec).encode_change(x.reshape(m.shape), None, seed, rows, after, _KEEPING)
    m.copy_(torch.stack(after))
    return payload


def delta_decode(payload: Tensor, m: Tensor, codec: str) -> Tensor:
    rows, after = _moving(m)
    y = torch.empty_like(m, memory_format=torch.contiguous_format)
    _codec(codec).decode_change(payload, None, rows, after, _KEEPING, y)
    m.copy_(y)
    return y


def _moving(m: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The rows of ``m``, and room for what they become: an error leaves ``m`` as it is."""
    if m.dim() != 2 or m.dtype != torch.float32:
        raise ValueError(f"references are [rows, n] float32, not {m.dtype} of {tuple(m.shape)}")
    after = torch.empty_like(m, memory_format=torch.contiguous_format)
    return list(m.contiguous().unbind()), list(after.unbind())


def _fake_encode(x: Tensor, codec: str, seed: int = 0) -> Tensor:
    return x.new_empty(_codec(codec).max_nbytes(x.shape, x.dtype), dtype=torch.uint8)


def _fake_decode(payload: Tensor, codec: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return payload.new_empty(tuple(shape), dtype=dtype)


def _fake_delta_encode(x: Tensor, m: Tensor, codec: str, seed: int = 0) -> Tensor:
    return _fake_encode(m, codec)


def _fake_delta_decode(payload: Tensor, m: Tensor, codec: str) -> Tensor:
    return m.new_empty(m.shape)


for _schema in _SCHEMAS:
    _LIBRARY.define(_schema)
for _name, _implementation, _fake in (
    ("encode", encode, _fake_encode),
    ("decode", decode, _fake_decode),
    ("delta_encode", delta_encode, _fake_delta_encode),
    ("delta_decode", delta_decode, _fake_delta_decode),
):
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"thinwire::{_name}", _fake, lib=_LIBRARY)
