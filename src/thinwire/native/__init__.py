"""The arithmetic of the codecs: a dispatch point for kernels, and the eager twin that defines them.

Every function here has the same name, arguments and bytes as its definition in ``reference``.
"""

from thinwire.native.reference import IntegerFormat, decode_rows, encode_rows, row_nbytes

__all__ = ["IntegerFormat", "decode_rows", "encode_rows", "row_nbytes"]
