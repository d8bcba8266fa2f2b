"""What names an exchange, and what does not."""

import pytest

import thinwire as tw
from thinwire.exchange import DGC, PowerSGD, Requantized, Sparse, exchange


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("raw", Requantized),
        ("int4:symmetric", Requantized),
        ("ef(int4:symmetric)", Requantized),
        ("ef(sign)", Requantized),
        ("topk:0.01", Sparse),
        ("ef(topk:0.01/bf16,residual=bf16)", Sparse),
        ("powersgd:4", PowerSGD),
        ("dgc:0.001,warmup=100", DGC),
    ],
)
def test_a_string_names_an_exchange(spec: str, kind: type) -> None:
    assert isinstance(exchange(spec), kind)


def test_it_prints_as_it_is_written() -> None:
    for spec in ("int4:symmetric", "ef(topk:0.01)", "ef(int4:symmetric,residual=bf16)"):
        assert str(exchange(spec)) == spec


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        ("delta(int4)", "pipeline's links"),
        ("ef21(topk:0.1)", "pipeline's links"),
        ("ef(int4,key=slot)", "leave key out"),
        ("ef(int4,residual=int8)", "fp32 or bf16"),
        ("powersgd:0", "1 … 1024"),
        ("powersgd", "rank"),
        ("dgc:2", "dgc"),
        ("dgc:0.1,momentum=1", "momentum"),
        ("topk:0.1,mask=shared", "another link"),
        ("ef(in4)", "did you mean"),
    ],
)
def test_others_are_refused_with_the_reason(spec: str, what: str) -> None:
    with pytest.raises(tw.SpecError, match=what):
        exchange(spec)


def test_a_share_falls_in_five_stages() -> None:
    found = exchange("dgc:0.001/bf16,warmup=10")
    assert isinstance(found, DGC)
    shares = [float(found.codec_at(step).fraction) for step in range(1, 12)]
    assert shares[0] == shares[1] == 0.25
    assert shares == sorted(shares, reverse=True)
    assert shares[8:] == [0.001] * 3
    assert len(set(shares)) == 5
