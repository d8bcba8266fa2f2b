"""The arithmetic of the codecs: kernels, and the eager twins that define them.

``encode_rows`` and ``decode_rows`` are the twin, for rows of one length on any device.
``kernels_for`` gives the kernels for all rows of a tensor at once, where there are any: ``encode``,
``decode`` and the AQ-SGD step, ``delta_encode`` and ``delta_decode``. Both give the same bytes.
"""

from thinwire.native.dispatch import Kernels, kernels_for
from thinwire.native.reference import IntegerFormat, decode_rows, encode_rows, row_nbytes

__all__ = [
    "IntegerFormat",
    "Kernels",
    "decode_rows",
    "encode_rows",
    "kernels_for",
    "row_nbytes",
]
