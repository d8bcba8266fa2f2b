"""What is measured, and the document that comes out of it; no claim on times."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from thinwire.bench import OPS, codecs, report
from thinwire.bench.codecs import Case, Data
from thinwire.bench.run import document
from thinwire.codecs import codec
from thinwire.native import library

NUMEL = 4 * 1024
LEVELS = (library.EAGER, *library.levels())


def measured(specs: tuple[str, ...] | None = None, ops: tuple[str, ...] = OPS) -> dict[str, Any]:
    coders = None if specs is None else [codec(spec) for spec in specs]
    return document([NUMEL], coders, ops, 1, 1, False, lambda line, stage: None)


@pytest.fixture(scope="module")
def usual() -> dict[str, Any]:
    return measured()


def test_every_usual_codec_has_a_row_of_its_own_for_each_operation(usual: dict[str, Any]) -> None:
    alone = [
        (row["op"], row["codec"], row["dtype"])
        for row in usual["rows"]
        if row["peer"] is None and row["reference"] is None
    ]
    assert len(alone) == len(set(alone))
    expected = {(op, spec, "fp32") for op in ("encode", "decode") for spec in codecs.CODECS}
    assert set(alone) == expected | {("encode", "int4", "bf16"), ("decode", "int4", "bf16")}


def test_changes_are_measured_for_each_way_to_keep_a_reference(usual: dict[str, Any]) -> None:
    alone = {
        (row["op"], row["codec"], row["reference"], row["dtype"], row["in_place"])
        for row in usual["rows"]
        if row["peer"] is None and row["reference"] is not None
    }
    kept = (("fp32", "fp32"), ("bf16", "bf16"), ("int8", "fp32"))
    what = (("delta_encode", None), ("delta_decode", True), ("delta_decode", False))
    assert alone == {
        (op, spec, reference, dtype, in_place)
        for spec in codecs.CHANGES
        for reference, dtype in kept
        for op, in_place in what
    }


def test_times_and_ratios_are_positive_and_fit_each_other(usual: dict[str, Any]) -> None:
    for row in usual["rows"]:
        nbytes = row["numel"] * (4 if row["dtype"] == "fp32" else 2)
        assert row["ms"] > 0
        assert row["x_copy"] == pytest.approx(row["copy_ms"] / row["ms"])
        assert row["gb_per_s"] == pytest.approx(nbytes / row["ms"] / 1e6)
        assert 0 < row["bits_per_value"] < 40
        assert (row["x_peer"] is None) == (row["peer"] is None)
        if row["peer"] is not None:
            assert row["x_peer"] == pytest.approx(row["peer_ms"] / row["ms"])


def test_a_row_with_a_peer_stands_beside_one_without(usual: dict[str, Any]) -> None:
    def case(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[k] for k in ("op", "codec", "dtype", "numel", "reference", "in_place"))

    alone = {case(row) for row in usual["rows"] if row["peer"] is None}
    peers = {row["peer"] for row in usual["rows"]} - {None}
    assert all(case(row) in alone for row in usual["rows"])
    assert set(usual["peers"]) == peers
    assert {"fbgemm", "torch cast", "torch.topk", "dgc", "ac-sgd", "hivemind uniform8"} <= peers


def test_a_named_integer_codec_has_its_change_measured() -> None:
    rows = measured(("int3:group=64",), ("delta_encode",))["rows"]
    assert {(row["op"], row["codec"]) for row in rows} == {("delta_encode", "int3:group=64")}


@pytest.mark.parametrize("level", LEVELS)
def test_a_row_says_which_kernels_ran(level: str) -> None:
    with library.forced(level):
        found = measured(("int4", "bf16"), ("encode",))
    assert found["machine"]["level"] == level
    assert {row["codec"]: row["level"] for row in found["rows"]} == {
        "int4": level,
        "bf16": library.EAGER,
    }
    assert ("slower torch twin" in report.heading(found["machine"])) == (level == library.EAGER)


@pytest.mark.skipif(not library.levels(), reason="no compiled kernels to compare with")
@pytest.mark.parametrize("kept", codecs.REFERENCES)
@pytest.mark.parametrize("in_place", [None, True, False])
def test_the_twin_moves_references_as_the_kernel_does(kept: str, in_place: bool | None) -> None:
    op = "delta_encode" if in_place is None else "delta_decode"
    case = Case(op, codec("int4"), codecs.REFERENCES[kept][1], kept, in_place)
    moved, outputs = [], []
    for level in (library.levels()[0], library.EAGER):
        data = Data(NUMEL)
        with library.forced(level):
            run = data.task(case)
            for _ in range(3):
                run()
        moved.append(data.reference(kept).kept)
        outputs.append(data.outputs[case.dtype])
    assert torch.equal(*moved)
    assert torch.equal(*outputs)
    assert bool(outputs[0].any()) == (in_place is False)


def test_nothing_that_is_measured_changes_the_inputs() -> None:
    data = Data(NUMEL)
    before = [x.clone() for pair in data.inputs.values() for x in pair]
    for case in codecs.cases(None, OPS):
        run = data.task(case)
        run()
        run()
    after = [x for pair in data.inputs.values() for x in pair]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_reference_stays_near_its_inputs() -> None:
    data = Data(NUMEL)
    runs = [
        data.task(case)
        for case in codecs.cases(None, ("delta_encode", "delta_decode"))
        if case.reference == "fp32"
    ]
    for run in runs * 20:
        run()
    distance = data.reference("fp32").kept - data.inputs["fp32"][0]
    assert float(distance.abs().max()) < 2.0
