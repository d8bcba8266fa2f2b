"""The wire format: header, section table, payloads, checksum, as ``docs/wire-format.md`` says.

Nothing in a received frame is trusted: every count and length is checked against what is there,
and the checksum (XXH3, 64 bits) is verified before the section table is read.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from thinwire.codecs import Codec, codec
from thinwire.errors import FrameError, PeerAborted, SpecError

Buffer = bytes | bytearray | memoryview
MAGIC = b"TWIR"
VERSION = 3
_HEADER = struct.Struct("<4sBBHQIIIQ")
_SECTION = struct.Struct("<BBBBIQ")
CHECKSUM_BYTES = 8
MIN_BYTES = _HEADER.size + CHECKSUM_BYTES
_MAX_DIMS = 16
_MAX_NAME = 255
#: The most that one section adds to a frame besides its payload, row mask and versions.
MAX_ENTRY_BYTES = _SECTION.size + 1 + _MAX_NAME + 8 * _MAX_DIMS + 8
#: Of one tensor.
MAX_SECTIONS = 9
_ALL_ROWS = 0xFFFFFFFF
_STATEFUL, _PREDICTED = 0x80, 0x40  # beside the kind
#: Bytes; an abort frame must fit into every receive that is posted.
_ABORT_TEXT = 2048

_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex32,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class Direction(enum.IntEnum):
    """Which way a frame goes over its edge; the others belong to no edge.

    Of an ``EXCHANGE`` the micro-batch is the bucket, and the edge the round.
    """

    FORWARD = 0
    BACKWARD = 1
    CONTROL = 2
    EXCHANGE = 3


class Kind(enum.IntEnum):
    """What a section holds, and what it does to the receiver's state."""

    VALUE = 0  # a value; touches no state
    FIRST = 1  # a value that becomes the reference of its rows
    CHANGE = 2  # a change, to be added to the reference of its rows
    RESEED = 3  # a value, sent since the change was larger; replaces
    ABSENT = 4  # no gradient: decodes to zeros
    NONFINITE = 5  # a gradient with a NaN or an infinity: decodes to NaN, touches no state
    CONTROL = 6  # text or numbers between steps
    ABORT = 7  # the sender gave up; the payload is the reason
    SAME = 8  # the value is the reference, as far as the receiver could tell; no payload
    REPAIR = 9  # FIRST, since the two ends did not hold the same of these rows
    SECOND = 10  # CHANGE at the second visit, in a codec of its own
    DENSE = 11  # a value as it is, before compression begins; what is remembered of it is exact
    RESIDUAL = 12  # what earlier values lacked, to be added to the VALUE of the same rows
    MAP = 13  # no rows: what both ends expect by, once the step counts
    APART = 14  # no rows: positions of the other sections' rows, as they are


_DIRECTIONS = frozenset(int(direction) for direction in Direction)
_KINDS = frozenset(int(kind) for kind in Kind)


class Place(NamedTuple):
    """The coordinates of a frame: it is refused anywhere else."""

    run: int = 0
    step: int = 0
    microbatch: int = 0
    edge: int = 0
    direction: Direction = Direction.FORWARD

    def __str__(self) -> str:
        return (
            f"run {self.run:x}, step {self.step}, micro-batch {self.microbatch}, "
            f"edge {self.edge} {self.direction.name.lower()}"
        )


_NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclasses.dataclass
class Section:
    """One tensor, or the rows of one tensor that travel in the same way.

    ``shape`` is the whole tensor's; ``rows`` the indices of those present (None: all, as one
    payload of the whole tensor). ``versions`` and ``keys`` name the state that the rows are coded
    against: visits before this one, and a digest of the rows' keys. ``predicted``: a byte of gain
    for each row comes first, and what both ends expect, times it, was left out.
    """

    kind: Kind
    codec: str = ""
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = ()
    payload: Tensor = _NOTHING
    rows: list[int] | None = None
    versions: list[int] | None = None
    keys: int = 0
    tensor: int = 0
    predicted: bool = False


def build(place: Place, sections: Sequence[Section]) -> list[memoryview]:
    """The frame as buffers to be sent one after the other (payloads are not copied).

    Payloads must be contiguous 1-D uint8 tensors on the CPU.
    """
    payloads = [s.payload.numpy().data for s in sections if s.payload.numel()]
    front = _front(place, sections)
    hashed = xxhash.xxh3_64(front)
    for payload in payloads:
        hashed.update(payload)
    return [memoryview(front), *payloads, memoryview(hashed.digest()[::-1])]


def seal(place: Place, sections: Sequence[Section], view: memoryview, start: int) -> int:
    """Make a frame of payloads that lie in ``view``, end to end from ``start`` on.

    Header and table go before them (there must be room), the checksum after them. Returns where
    the frame begins; it ends 8 bytes after the last payload.
    """
    front = _front(place, sections)
    first = start - len(front)
    view[first:start] = front
    end = start + sum([s.payload.numel() for s in sections])
    view[end : end + CHECKSUM_BYTES] = checksum(view[first:end])
    return first


def is_intact(data: memoryview, head: bytes, payload_nbytes: int) -> bool:
    """Whether ``data`` is an undamaged frame that begins with ``head``, which tells all of it but
    the ``payload_nbytes`` that follow."""
    end = len(head) + payload_nbytes
    return (
        len(data) == end + CHECKSUM_BYTES
        and data[: len(head)] == head
        and data[end:] == checksum(data[:end])
    )


def checksum(data: Buffer) -> bytes:
    """What follows the bytes ``data`` of a frame."""
    return xxhash.xxh3_64_digest(data)[::-1]  # which is big-endian


def head_nbytes(tensors: int, rows: int) -> int:
    """The most bytes before the payloads of ``tensors`` tensors of ``rows`` rows each.

    A tensor has up to ``MAX_SECTIONS``, each with a row mask; versions come once a row.
    """
    return _HEADER.size + tensors * (MAX_SECTIONS * (MAX_ENTRY_BYTES + rows // 8 + 1) + 4 * rows)


def head(place: Place, count: int, table: bytes, payload_nbytes: int) -> bytes:
    """Header and section table of a frame; the table has ``count`` entries."""
    total = MIN_BYTES + len(table) + payload_nbytes
    run, step, microbatch, edge, direction = place
    fields = MAGIC, VERSION, direction, count, run, step, microbatch, edge, total
    return _HEADER.pack(*fields) + table


def _front(place: Place, sections: Sequence[Section]) -> bytes:
    table = b"".join([_whole_entry(s) for s in sections])
    return head(place, len(sections), table, sum([s.payload.numel() for s in sections]))


def text_section(kind: Kind, text: str) -> Section:
    """A section that holds text, as control and abort frames do."""
    return Section(kind, payload=torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))


def abort_section(kind: str, why: str) -> Section:
    """What a sender that gives up sends in place of a message: its error's name, and its text."""
    text = f"{kind}\n{why}".encode()[:_ABORT_TEXT].decode("utf-8", "ignore")
    return text_section(Kind.ABORT, text)


def raise_abort(sections: Sequence[Section]) -> None:
    """Raise PeerAborted with the sender's reason if these are the sections of an abort frame."""
    if sections and sections[0].kind == Kind.ABORT:
        text = bytes(sections[0].payload.numpy()).decode("utf-8", "replace")
        kind, _, why = text.partition("\n")
        raise PeerAborted(why, kind)


def nbytes(sections: Sequence[Section]) -> int:
    """Bytes of the frame that ``build`` would make of these sections."""
    return MIN_BYTES + sum(len(_whole_entry(s)) + s.payload.numel() for s in sections)


def _whole_entry(section: Section) -> bytes:
    found = entry(section, section.payload.numel())
    return found if section.versions is None else found + state(section.keys, section.versions)


def entry(section: Section, payload_nbytes: int) -> bytes:
    """A section's part of the table, up to its state; the payload need not be there yet."""
    stateful = section.versions is not None
    fixed, described = _described(section.codec, section.dtype, section.shape)
    found = _SECTION.pack(
        section.tensor,
        section.kind | (_STATEFUL if stateful else 0) | (_PREDICTED if section.predicted else 0),
        fixed,
        len(section.shape),
        _ALL_ROWS if section.rows is None else len(section.rows),
        payload_nbytes,
    )
    found += described
    if section.rows is not None:
        present = np.zeros(section.shape[0], dtype=np.uint8)
        present[section.rows] = 1
        found += np.packbits(present, bitorder="little").tobytes()
    return found


def state(keys: int, versions: Sequence[int]) -> bytes:
    """What follows ``entry`` where a section is coded against a state."""
    return struct.pack(f"<Q{len(versions)}I", keys, *versions)


@functools.lru_cache(maxsize=1024)
def _described(codec: str, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, bytes]:
    """(the dtype's code, the codec's name and the shape as bytes): alike in every step."""
    if dtype not in _DTYPE_CODES or len(shape) > _MAX_DIMS:
        raise ValueError(
            f"a tensor of {dtype} with {len(shape)} dimensions cannot be framed; "
            f"at most {_MAX_DIMS} dimensions, and torch's plain dtypes, can"
        )
    name = codec.encode("ascii")
    described = struct.pack("<B", len(name)) + name + struct.pack(f"<{len(shape)}Q", *shape)
    return _DTYPE_CODES[dtype], described


def parse(data: Buffer, expect: Place | None = None) -> tuple[Place, list[Section]]:
    """Read a frame; with ``expect``, one for exactly that place.

    Payload tensors are views of ``data`` where it is writable, else copies. Raises FrameError
    with the reason if the bytes are short, long, corrupt, of another version or for another place.
    """
    try:
        view = memoryview(data).cast("B")
    except TypeError as error:
        raise FrameError(f"a frame is contiguous bytes, not {type(data).__name__}") from error
    place, count = _check(view, expect)
    reader = _TableReader(view, _HEADER.size, len(view) - CHECKSUM_BYTES)
    entries = [reader.entry(k) for k in range(count)]
    sections: list[Section] = []
    at = reader.at
    for section, nbytes in entries:
        end = at + nbytes
        if end > reader.end:
            raise FrameError(
                f"section {len(sections)} claims {nbytes} payload bytes, {reader.end - at} are left"
            )
        section.payload = _as_tensor(view[at:end])
        sections.append(section)
        at = end
    if at != reader.end:
        raise FrameError(f"{reader.end - at} bytes follow the last section")
    return place, sections


def _check(view: memoryview, expect: Place | None) -> tuple[Place, int]:
    """Verify header, length and checksum; returns the place and the number of sections."""
    if len(view) < MIN_BYTES:
        raise FrameError(f"cut short: {len(view)} bytes, a frame has at least {MIN_BYTES}")
    fields = _HEADER.unpack_from(view)
    magic, version, direction, count, run, step, microbatch, edge, total = fields
    if magic != MAGIC:
        raise FrameError(f"starts with {bytes(magic)!r}, not {MAGIC!r}: no thinwire frame")
    if version != VERSION:
        raise FrameError(f"wire format version {version}; this is version {VERSION}")
    if total != len(view):
        what = "cut short" if total > len(view) else "too long"
        raise FrameError(f"{what}: {len(view)} bytes, its header says {total}")
    end = total - CHECKSUM_BYTES
    if view[end:] != checksum(view[:end]):
        raise FrameError("damaged: the checksum does not match")
    if direction not in _DIRECTIONS:
        raise FrameError(f"unknown direction {direction}")
    place = Place(run, step, microbatch, edge, Direction(direction))
    if expect is not None and place != expect:
        raise FrameError(f"a frame for {place} arrived where one for {expect} was expected")
    return place, count


class _TableReader:
    """Reads the section table, checking each count against the bytes that are left."""

    def __init__(self, view: memoryview, at: int, end: int) -> None:
        self.view, self.at, self.end = view, at, end

    def take(self, nbytes: int) -> memoryview:
        if nbytes > self.end - self.at:
            raise FrameError("the section table runs past the end of the frame")
        part = self.view[self.at : self.at + nbytes]
        self.at += nbytes
        return part

    def entry(self, index: int) -> tuple[Section, int]:
        """(a section without its payload, the payload's bytes)."""
        tensor, kind, dtype, dims, count, nbytes = _SECTION.unpack(self.take(_SECTION.size))
        stateful, predicted = bool(kind & _STATEFUL), bool(kind & _PREDICTED)
        kind &= ~(_STATEFUL | _PREDICTED)
        if kind not in _KINDS or dtype >= len(_DTYPES) or dims > _MAX_DIMS:
            raise FrameError(f"section {index}: unknown kind {kind}, dtype {dtype} or {dims} dims")
        try:
            name = bytes(self.take(self.take(1)[0])).decode("ascii")
        except UnicodeDecodeError:
            raise FrameError(f"section {index}: the codec's name is not ASCII") from None
        shape = struct.unpack(f"<{dims}Q", self.take(8 * dims))
        if math.prod(max(d, 1) for d in shape) >= 1 << 48:
            raise FrameError(f"section {index}: a tensor of shape {shape} is not plausible")
        section = Section(Kind(kind), name, _DTYPES[dtype], shape, tensor=tensor)
        section.predicted = predicted
        if count != _ALL_ROWS:
            section.rows = self.rows(index, shape, count)
        if stateful:
            length = count if count != _ALL_ROWS else (shape[0] if shape else 0)
            state = self.take(8 + 4 * length)
            section.keys = struct.unpack_from("<Q", state)[0]
            section.versions = list(struct.unpack_from(f"<{length}I", state, 8))
        return section, nbytes

    def rows(self, index: int, shape: tuple[int, ...], count: int) -> list[int]:
        if not shape:
            raise FrameError(f"section {index}: rows of a tensor without dimensions")
        mask = self.take(-(-shape[0] // 8))
        present = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        rows = [int(r) for r in np.flatnonzero(present)]
        if len(rows) != count or (rows and rows[-1] >= shape[0]):
            raise FrameError(f"section {index}: the row mask does not name {count} of its rows")
        return rows


def _as_tensor(view: memoryview) -> Tensor:
    if len(view) == 0:
        return _NOTHING
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


def pack(x: Tensor, spec: str | Codec) -> bytes:
    """A self-describing frame of one tensor: shape, dtype, codec and checksum inside.

    ``spec`` names a stateless codec. Raises SpecError, or NonFiniteError from the codec.
    """
    coder = codec(spec) if isinstance(spec, str) else spec
    payload = coder.encode(x).cpu()
    section = Section(Kind.VALUE, str(coder), x.dtype, tuple(x.shape), payload)
    return b"".join(build(Place(), [section]))


def unpack(frame: Buffer | Tensor) -> Tensor:
    """The tensor (on the CPU) behind ``pack``'s bytes, or a 1-D uint8 tensor of them.

    Raises FrameError if they are damaged or bound to a place, an edge and its state.
    """
    if isinstance(frame, Tensor):
        if frame.dtype != torch.uint8 or frame.dim() != 1:
            raise FrameError(f"a frame is 1-D uint8, not {frame.dtype} of {tuple(frame.shape)}")
        frame = frame.detach().cpu().contiguous().numpy().data
    _, sections = parse(frame)
    section = sections[0] if len(sections) == 1 else Section(Kind.CONTROL)
    bound = section.rows is not None or section.versions is not None or section.predicted
    if bound or section.kind != Kind.VALUE:
        raise FrameError("bound to an edge and its state: it does not decode alone")
    try:
        coder = codec(section.codec)
        return coder.decode(section.payload, section.shape, section.dtype)
    except (SpecError, ValueError, RuntimeError) as error:  # of torch: no memory for such a shape
        raise FrameError(str(error).partition("\n")[0]) from None
