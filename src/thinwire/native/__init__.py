"""The arithmetic of the codecs: kernels, and the eager twins that define them.

``encode_rows`` and ``decode_rows`` are the twin, for rows of one length on any device.
``kernels_for`` gives the kernels for all rows of a tensor at once, where there are any: ``encode``,
``decode`` and the AQ-SGD step, ``delta_encode`` and ``delta_decode``; ``bound`` gives them for
tensors of one shape on the CPU. All give the same bytes.
"""

from thinwire.native.dispatch import Kernels, kernels_for
from thinwire.native.kernels import Bound, address, addresses, bound
from thinwire.native.reference import IntegerFormat, decode_rows, encode_rows, row_nbytes

__all__ = [
    "Bound",
    "IntegerFormat",
    "Kernels",
    "address",
    "addresses",
    "bound",
    "decode_rows",
    "encode_rows",
    "kernels_for",
    "row_nbytes",
]
