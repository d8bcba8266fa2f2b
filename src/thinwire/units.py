"""Link rates and latencies as people write them; needs nothing slow, as the command reads them."""

from __future__ import annotations

import math
import re

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_LEAST_RATE = 1e3  # bit/s
_MOST_LATENCY = 60.0  # seconds
_RATE = re.compile(r"([0-9]*\.?[0-9]+(?:e[0-9]+)?)([kmgt]?)(?:bit|bps|bit/s|bits/s|b/s)?")
_TIME = re.compile(r"([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)(us|ms|s)")


def parse_rate(text: str) -> float | None:
    """A link rate in bit/s from ``100mbit``, ``1 Gbit/s``, ``1e8``; None for ``none``.

    Raises ValueError on anything else, on bytes (``MB/s``), and below 1 kbit/s, where a number
    has most likely lost its unit and a step would take hours.
    """
    words = "".join(text.split())
    compact = words.lower()
    if compact == "none":
        return None
    in_bytes = "B" in words.replace("Bit", "").replace("BIT", "")
    match = None if in_bytes else _RATE.fullmatch(compact)
    rate = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < rate < math.inf:
        raise ValueError(f"{text!r} is no link rate; write 100mbit, 1gbit, or none")
    if match and rate < _LEAST_RATE:
        raise ValueError(
            f"{text!r} is {rate:g} bit/s, which is below 1 kbit/s; write {match[1]}mbit"
        )
    return rate


def parse_latency(text: str) -> float:
    """Seconds from ``5ms``, ``0.03s``, ``200us`` or ``0``.

    Raises ValueError on anything else, and above 60 s.
    """
    compact = "".join(text.split()).lower()
    if compact in ("0", "none"):
        return 0.0
    match = _TIME.fullmatch(compact)
    seconds = float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]] if match else math.inf
    if seconds == math.inf:
        raise ValueError(f"{text!r} is no latency; write 5ms, 0.03s, or 0")
    if seconds > _MOST_LATENCY:
        raise ValueError(f"{text!r} is a latency above 60 s; write 5ms, 0.03s, or 0")
    return seconds
