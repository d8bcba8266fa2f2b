"""``thinwire bench``: what the codecs cost beside a copy and beside their peers."""

OPS = ("encode", "decode", "delta_encode", "delta_decode")
ROW = 1024  # values in a row of the tensors that are coded
