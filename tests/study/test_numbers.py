"""The arithmetic of a study: paired differences, predicted times, equal bytes, tables."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from thinwire.study import predict, tables
from thinwire.study.grid import Grid, Plan
from thinwire.study.paired import Difference, paired
from thinwire.study.results import append, curve, load


def test_a_difference_is_taken_seed_by_seed() -> None:
    found = paired({0: 1.5, 1: 2.7, 3: 9.0}, {0: 1.0, 1: 2.0, 2: 5.0})
    assert found is not None
    assert found.values == pytest.approx((0.5, 0.7))
    assert found.mean == pytest.approx(0.6)
    assert found.error == pytest.approx(0.1)
    assert found.beyond
    assert found.text() == "+0.6000 ± 0.1000"
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_one_value_has_no_error() -> None:
    assert Difference((0.25,)).error is None
    assert Difference((0.25,)).text(signed=False, decimals=2) == "0.25"
    assert Difference((-3e-7,)).text() == "-3e-07"


def result(key: str = "a", seed: int = 0, loss: float = 1.0, **more: Any) -> dict[str, Any]:
    """Two epochs of 100 steps; two stages of 10 ms in all a step; one link."""
    points = [
        {"step": 100, "val_loss_codec": 3.0, "bytes": {"0 forward": 10_000, "0 backward": 4_000}},
        {"step": 200, "val_loss_codec": 1.0, "bytes": {"0 forward": 15_000, "0 backward": 8_000}},
    ]
    link = {"edge": 0, "codec": "x", "header_bytes": 0, "values": 1000}
    return {
        "key": key,
        "plan": key,
        "seed": seed,
        "lr": None,
        "scores": [
            {"split": "test", "codec": "off", "loss": loss},
            {"split": "test", "codec": "as-trained", "loss": loss + 0.5},
        ],
        "links": [
            {**link, "direction": "forward", "payload_bytes": 15_000},
            {**link, "direction": "backward", "payload_bytes": 8_000},
        ],
        "curve": points,
        "compute_ms": 10.0,
        "stages": 2,
        "microbatches": 4,
        **more,
    }


def test_a_step_takes_compute_or_the_link_whichever_is_longer() -> None:
    one = result()
    assert predict.compute_s(one) == pytest.approx(0.01 / 2 * 5 / 4)
    assert predict.seconds(one, 1e9) == pytest.approx(200 * 0.00625)
    # 80,000 bits, then 40,000, at 10 kbit/s
    assert predict.seconds(one, 1e4) == pytest.approx(8 + 4)


def test_the_time_to_a_loss_is_interpolated_between_epochs() -> None:
    one = result()
    assert predict.seconds_to(one, 1e4, 3.0) == pytest.approx(8)
    assert predict.seconds_to(one, 1e4, 2.0) == pytest.approx(8 + 2)
    assert predict.seconds_to(one, 1e4, 1.0) == pytest.approx(12)
    assert predict.seconds_to(one, 1e4, 0.5) is None


def test_the_loss_at_so_many_bytes_is_interpolated_too() -> None:
    one = result()
    assert predict.loss_after(one, 14_000) == 3.0
    assert predict.loss_after(one, 18_500) == pytest.approx(2.0)
    assert predict.loss_after(one, 99_999) == 1.0
    assert predict.loss_after(one, 1_000) is None


def test_a_curve_has_an_epoch_a_point() -> None:
    links = [{"edge": 0, "direction": "forward", "payload_bytes": 5, "header_bytes": 1}]
    records: list[dict[str, Any]] = [
        {"step": 1, "loss": 9.0},
        {"step": 2, "loss": 8.0, "links": links},
        {"step": 2, "val_loss_codec": 4.0},
        {"step": 3, "loss": 7.0},
    ]
    summary = {"steps": 4, "val_loss_codec": 2.0, "links": links}
    assert curve(records, summary) == [
        {"step": 2, "val_loss_codec": 4.0, "bytes": {"0 forward": 6}},
        {"step": 4, "val_loss_codec": 2.0, "bytes": {"0 forward": 6}},
    ]


def test_a_line_that_was_cut_short_costs_its_run_alone(tmp_path: Path) -> None:
    append(tmp_path, result("a"))
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"key": "b", "sco')
    append(tmp_path, result("c"))
    assert sorted(load(tmp_path)) == ["a", "c"]


@pytest.mark.parametrize(
    "spoiled",
    [
        {"links": None},
        {"seed": "a"},
        {"curve": []},
        {"scores": []},
        {"scores": "none"},
        {"scores": [{"split": "val", "codec": "off", "loss": math.nan}]},
        {"scores": [{"split": "val", "codec": "off", "loss": 1e308}]},
        {"scores": [{"split": "val", "codec": "off", "loss": 1.0, "accuracy": "x"}]},
        {"stages": 0},
        {"compute_ms": None},
    ],
)
def test_what_is_no_result_is_left_out(spoiled: dict[str, Any], tmp_path: Path) -> None:
    append(tmp_path, result("a"))
    append(tmp_path, {**result("b"), **spoiled})
    with (tmp_path / "results.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n" + b"[" * 100_000 + b"\n[1]\n")
    append(tmp_path, {"key": "d", "seed": 0, "failed": "the loss is not finite"})
    assert sorted(load(tmp_path)) == ["a", "d"]


def study() -> tuple[Grid, dict[str, Any]]:
    plans = (Plan("fp32", {}), Plan("int4 / int8", {"plan.forward": "int4"}), Plan("bad", {"a": 1}))
    grid = Grid("A study", {}, plans, "fp32", seeds=2, rates=("10kbit",), deviations=("smaller",))
    results: dict[str, Any] = {}
    for plan, losses in zip(plans, [(1.0, 2.0), (1.1, 2.3)], strict=False):
        for case, loss in zip(grid.finals(plan, None), losses, strict=True):
            results[case.key] = result(case.key, case.seed, loss)
    results[grid.finals(plans[2], None)[0].key] = {"key": "x", "failed": "the loss is not finite"}
    return grid, results


def test_the_document_has_means_and_paired_differences() -> None:
    grid, results = study()
    found = tables.document(grid, results, {})
    json.dumps(found, allow_nan=False)
    fp32, int4, bad = found["plans"]
    assert fp32["scores"]["off"]["loss"]["mean"] == 1.5
    assert fp32["scores"]["off"]["loss"]["above_baseline"] == 0
    assert int4["scores"]["off"]["loss"]["above_baseline"] == pytest.approx(0.2)
    assert int4["scores"]["off"]["loss"]["above_baseline_error"] == pytest.approx(0.1)
    assert int4["scores"]["as-trained"]["loss"]["above_baseline"] == pytest.approx(0.7)
    assert int4["bits"] == {"forward": 120, "backward": 64}
    assert found["target"] == pytest.approx(1.01)
    assert int4["seconds_to_target"]["10kbit"] == pytest.approx(8 + 4 * (2 - 0.01) / 2)
    assert bad == {"name": "bad", "lr": None, "runs": 0, "failed": ["the loss is not finite"]} | {
        "seconds_to_target": {"10kbit": None}
    }


def test_the_table_tells_what_was_found_and_what_was_not_run() -> None:
    grid, results = study()
    text = tables.markdown(tables.document(grid, results, {}))
    scores = "1.7000 ± 0.6000 | 2.2000 ± 0.6000 | +0.2000 ± 0.1000 | +0.7000 ± 0.1000"
    assert f"| `int4 / int8` | 2 | {scores} |" in text
    assert "| `bad` | 0 | the loss is not finite |" in text
    assert "\n* Deviation: smaller\n* bad: 1 of its runs broke off" in text
    empty = tables.markdown(tables.document(grid, {}, {}))
    assert empty.count("not run") == 3


def test_the_latex_table_has_as_many_columns_as_it_says() -> None:
    grid, results = study()
    text = tables.latex(tables.document(grid, results, {}))
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    columns = text.split(r"\begin{tabular}{")[1].index("}")
    assert {row.count("&") for row in rows} == {columns - 1}
    assert "±" not in text.split(r"\begin")[1]


def test_what_was_expected_is_a_column_where_something_was() -> None:
    grid, results = study()
    assert "dB gained" not in tables.markdown(tables.document(grid, results, {}))
    for case, first in zip(grid.finals(grid.plans[1], None), (6.0, 8.0), strict=True):
        results[case.key]["links"][0]["gain_db"] = {"first": first, "change": 3.0}
        results[case.key]["links"][1]["gain_db"] = {}
    found = tables.document(grid, results, {})
    assert found["plans"][1]["gain_db"] == {
        "forward": {"first": 7.0, "change": 3.0},
        "backward": {},
    }
    lines = tables.markdown(found).splitlines()
    assert any(line.endswith("| dB gained forward | dB gained backward |") for line in lines)
    assert any(line.endswith("| first 7.0, change 3.0 | – |") for line in lines)
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
