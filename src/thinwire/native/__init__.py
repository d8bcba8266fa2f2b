"""The arithmetic of the codecs: compiled kernels, and the eager twins that define them.

``encode_rows`` and ``decode_rows`` are the twin, for rows of one length on any device. ``encode``,
``decode`` and the AQ-SGD step, ``delta_encode`` and ``delta_decode``, are the kernels, for all rows
of a tensor at once, where ``usable`` says that they are there; ``bound`` gives them for tensors of
one shape. Both give the same bytes.
"""

from thinwire.native.kernels import (
    Bound,
    address,
    addresses,
    bound,
    decode,
    delta_decode,
    delta_encode,
    encode,
    usable,
)
from thinwire.native.reference import IntegerFormat, decode_rows, encode_rows, row_nbytes

__all__ = [
    "Bound",
    "IntegerFormat",
    "address",
    "addresses",
    "bound",
    "decode",
    "decode_rows",
    "delta_decode",
    "delta_encode",
    "encode",
    "encode_rows",
    "row_nbytes",
    "usable",
]
