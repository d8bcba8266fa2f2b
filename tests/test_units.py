"""How link rates and latencies are read, and that this needs nothing slow."""

import subprocess
import sys

import pytest

from thinwire.units import parse_latency, parse_rate


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("100mbit", 100e6),
        ("100 Mbit/s", 100e6),
        ("1gbit", 1e9),
        ("1 Gbps", 1e9),
        ("2.5gbit", 2.5e9),
        ("100 MBit/s", 100e6),
        ("500k", 500e3),
        ("1e8", 1e8),
        (".5 mbit", 500e3),
        ("8000 bits/s", 8e3),
        ("1k", 1e3),
        ("1tbit", 1e12),
        ("none", None),
        (" NONE ", None),
    ],
)
def test_a_rate_is_read(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fast",
        "0",
        "0mbit",
        "-1mbit",
        "nan",
        "inf",
        "1e999",
        "1..2",
        "٣",
        "100 MB/s",
        "100MBps",
        "100mbyte",
    ],
)
def test_a_bad_rate_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match=r"is no link rate; write 100mbit, 1gbit, or none") as info:
        parse_rate(text)
    assert repr(text) in str(info.value)


@pytest.mark.parametrize(
    ("text", "meant"), [("30", "30mbit"), ("999 bit/s", "999mbit"), ("0.5k", "0.5mbit")]
)
def test_a_rate_without_its_unit_is_refused_with_what_was_meant(text, meant):
    with pytest.raises(ValueError, match=rf"below 1 kbit/s; write {meant}"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["61s", "1e300s"])
def test_a_latency_above_a_minute_is_refused(text):
    with pytest.raises(ValueError, match="above 60 s"):
        parse_latency(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5ms", 5e-3), ("0.03s", 0.03), ("200 us", 200e-6), ("0", 0.0), ("none", 0.0), ("0ms", 0.0)],
)
def test_a_latency_is_read(text, seconds):
    assert parse_latency(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "soon", "-5ms", "nan", "inf", "5min", "1e999s"])
def test_a_bad_latency_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match=r"is no latency; write 5ms, 0.03s, or 0"):
        parse_latency(text)


def test_a_word_that_is_no_command_is_refused_without_torch() -> None:
    code = "import sys, thinwire.train.arguments; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
