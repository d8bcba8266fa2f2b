"""The hashes of ``thinwire selftest``, under the names that the tests use.

As a script it computes them on this machine and prints them as JSON, so that a test can compare
processes under different ``ATEN_CPU_CAPABILITY``, and a change of the format be written down.
"""

from __future__ import annotations

import json

import torch

from thinwire import selftest
from thinwire.selftest import SPECS, cases, integers

__all__ = ["GOLDEN", "SPECS", "cases", "digest", "integers"]

GOLDEN = selftest.CODECS | selftest.SCHEMES


def digest(device: torch.device | str = "cpu") -> dict[str, str]:
    """What ``GOLDEN`` has to be, computed on ``device``."""
    codecs = {spec: selftest.codec_digest(spec, device) for spec in selftest.CODECS}
    return codecs | {spec: selftest.scheme_digest(spec, device) for spec in selftest.SCHEMES}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(digest(), indent=4))
