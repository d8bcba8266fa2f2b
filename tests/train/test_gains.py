"""What both ends expected is told at the end of a run."""

from thinwire.train.report import gains_sentence


def test_gains_are_told_by_link_and_kind() -> None:
    links = [
        {"edge": 0, "direction": "forward", "gain_db": {"first": 8.56, "change": 6.08}},
        {"edge": 0, "direction": "backward", "gain_db": {}},
        {"edge": 1, "direction": "backward", "gain_db": {"value": 5.59}},
    ]
    assert gains_sentence(links) == (
        "Expected by both ends, in dB (6 are a bit a value): forward 0→1 first 8.6, change 6.1; "
        "backward 2→1 value 5.6."
    )
    assert gains_sentence(links[1:2]) is None
