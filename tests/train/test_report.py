"""What a run shows and keeps: the sentence, the lines, the table, the files."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from thinwire.train import check, metrics, report
from thinwire.train.bound import StepCosts, bound_sentence, next_flag, step_costs
from thinwire.train.config import Config, ConfigError, LinkConfig, PipelineConfig, PlanConfig
from thinwire.train.summary import cpu_costs


def link(direction: str, payload: int, edge: int = 0) -> dict[str, Any]:
    return {
        "edge": edge,
        "direction": direction,
        "codec": "int4",
        "messages": 10,
        "rested": 0,
        "payload_bytes": payload,
        "header_bytes": 100,
        "raw_bytes": 8 * payload,
        "values": 2 * payload,
        "bits_per_value": 4.25,
        "steady_bits_per_value": None,
        "kinds": {
            kind: {
                "messages": 5,
                "payload_bytes": payload // 2,
                "header_bytes": 50,
                "values": payload,
            }
            for kind in ("first", "change")
        },
    }


LINKS = [link("forward", 1000), link("backward", 2000)]
CONFIG = check.resolved(Config())


def costs(**milliseconds: float) -> StepCosts:
    parts = {"step_ms": 100, "compute_ms": 1, "link_ms": 1, "latency_ms": 1, "codec_ms": 1}
    return StepCosts(**{**parts, "wait_ms": 0, **milliseconds})


@pytest.mark.parametrize("part", ["compute", "link", "latency", "codec"])
def test_the_sentence_names_the_largest_part_and_all_milliseconds(part: str) -> None:
    sentence = bound_sentence(costs(**{f"{part}_ms": 77}), LINKS, CONFIG)
    assert sentence.lower().removeprefix("the ").startswith(f"{part} bounds this run")
    assert "77 ms" in sentence
    assert "next try --" in sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (PlanConfig("delta(int4)", "int8"), "--backward int6"),
        (PlanConfig("delta(int4)", "bf16"), "--backward int8"),
        (PlanConfig("delta(int4)", "int2"), "--model.layers 8"),
    ],
)
def test_a_run_bound_by_the_link_should_narrow_its_slower_direction(
    plan: PlanConfig, expected: str
) -> None:
    config = dataclasses.replace(CONFIG, plan=plan)
    assert next_flag(costs(link_ms=50), LINKS, config) == expected


def test_a_narrower_scheme_keeps_its_other_options() -> None:
    config = dataclasses.replace(CONFIG, plan=PlanConfig("delta(int4:group=64,first=int8)"))
    links = [link("forward", 3000), link("backward", 2000)]
    assert (
        next_flag(costs(link_ms=50), links, config) == "--forward 'delta(int3:group=64,first=int8)'"
    )


def scheduled(
    schedule: str,
    microbatches: int = 8,
    stages: int | None = None,
    nproc: int | None = None,
    transport: str = "gloo",
) -> Config:
    pipeline = PipelineConfig(schedule=schedule, microbatches=microbatches, stages=stages)
    link = LinkConfig(transport=transport)
    return check.resolved(dataclasses.replace(Config(), pipeline=pipeline, nproc=nproc, link=link))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (scheduled("1F1B"), "--pipeline.schedule GPipe"),
        (scheduled("Interleaved1F1B"), "--pipeline.schedule GPipe"),
        (scheduled("Interleaved1F1B", stages=4), "--pipeline.schedule LoopedBFS"),
        (scheduled("ZBV"), "--pipeline.schedule LoopedBFS"),
        (scheduled("Interleaved1F1B", microbatches=2), "--train.batch 32"),
        (scheduled("GPipe"), "--train.batch 32"),
    ],
)
def test_a_run_bound_by_latency_should_send_all_micro_batches_ahead(
    config: Config, expected: str
) -> None:
    assert next_flag(costs(latency_ms=50), LINKS, config) == expected


@pytest.mark.parametrize(
    ("config", "hops", "measured"),
    [  # latencies a step, compute left out: on one machine, at 50 or 100 ms and 1 Gbit/s
        (scheduled("GPipe"), 1, 4.1),
        (scheduled("1F1B"), 1, 10.4),
        (scheduled("Interleaved1F1B"), 1, 8.1),
        (scheduled("LoopedBFS"), 1, 4.2),
        (scheduled("InterleavedZeroBubble"), 1, 10.1),
        (scheduled("ZBV"), 2, 12.9),
        (scheduled("LoopedBFS", stages=4), 3, 8.2),
        (scheduled("Interleaved1F1B", stages=4), 3, 18.4),
        (scheduled("InterleavedZeroBubble", stages=4), 3, 21.4),
        (scheduled("GPipe", nproc=4), 3, 8.3),
        (scheduled("1F1B", nproc=4), 3, 18.6),
        (scheduled("Interleaved1F1B", nproc=4), 3, 14.3),
        (scheduled("LoopedBFS", transport="memory"), 1, 2.9),
        (scheduled("Interleaved1F1B", transport="memory"), 1, 10.2),
        (scheduled("Interleaved1F1B", stages=4, transport="memory"), 3, 28.9),
    ],
)
def test_the_latency_of_a_step_is_near_what_was_measured(
    config: Config, hops: int, measured: float
) -> None:
    ranks = [dict.fromkeys(("step_s", "compute_s", "codec_s", "wait_s", "link_s"), 1.0)]
    assert step_costs(ranks, 1, hops, config).latency_ms / 5 == pytest.approx(measured, rel=0.2)


def test_a_run_bound_by_compute_on_a_bare_link_is_not_told_to_emulate_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    bare = dataclasses.replace(CONFIG, link=LinkConfig(rate="none"))
    assert next_flag(costs(compute_ms=50), LINKS, bare) == "--pipeline.microbatches 16"


def test_a_run_bound_by_compute_is_told_what_a_slower_link_would_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    sentence = bound_sentence(costs(compute_ms=50, link_ms=10), LINKS, CONFIG)
    assert "next try --link.rate 20mbit, to see where the link begins to bound." in sentence


def test_costs_are_those_of_the_busiest_rank() -> None:
    ranks = [
        {"step_s": 1.0, "compute_s": 0.5, "codec_s": 0.1, "wait_s": 0.4, "link_s": 0.2},
        {"step_s": 1.0, "compute_s": 0.7, "codec_s": 0.2, "wait_s": 0.1, "link_s": 0.3},
    ]
    found = step_costs(ranks, steps=10, hops=1, config=CONFIG)
    assert found.compute_ms == pytest.approx(70)
    assert found.codec_ms == pytest.approx(20)
    assert found.link_ms == pytest.approx(30)
    assert found.latency_ms == pytest.approx(40)  # 3 round trips, header and agreement, 5 ms each


def test_what_compression_costs_is_told_of_the_rank_that_it_costs_most() -> None:
    ranks = [{"cpu_s": 1.2, "codec_s": 0.018}, {"cpu_s": 1.0, "codec_s": 0.02}]
    found = cpu_costs(ranks, steps=10)
    assert found[0] == pytest.approx({"step_ms": 120, "codec_ms": 1.8, "codec_share": 0.015})
    assert report.compression_sentence(found) == (
        "Compression took 2.0 % of a rank's CPU time: 2.0 ms of 100 ms a step."
    )


def test_on_a_bare_link_its_cost_is_what_even_the_least_waiting_rank_waited() -> None:
    bare = dataclasses.replace(CONFIG, link=LinkConfig(rate="none"))
    ranks = [
        {"step_s": 1.0, "compute_s": 0.5, "codec_s": 0.1, "wait_s": w, "link_s": 0.0}
        for w in (0.4, 0.2)
    ]
    assert step_costs(ranks, steps=10, hops=1, config=bare).link_ms == pytest.approx(20)


def test_a_run_without_links_is_bound_by_compute() -> None:
    bare = dataclasses.replace(CONFIG, link=LinkConfig(rate="none"))
    rank = {"step_s": 1.0, "compute_s": 0.5, "codec_s": 0.0, "wait_s": 0.9, "link_s": 0.0}
    assert "Compute bounds" in bound_sentence(step_costs([rank], 10, 0, bare), [], bare)


def test_the_progress_line_shows_loss_speed_traffic_ratio_and_busy_share() -> None:
    line = report.progress_line(
        epoch="1/3", step="10/648", loss=2.5, unit="tokens", per_s=12345.6, links=LINKS, busy=0.371
    )
    for part in ("loss 2.5000", "12,346 tokens/s", "0.0 MB sent", "7.5x less", "37 % busy"):
        assert part in line


def test_without_a_terminal_progress_is_plain_lines_once_a_log_interval() -> None:
    stream = io.StringIO()
    with report.LiveLine(Console(file=stream, width=118)) as live:
        live.show("one", logged=False)
        live.show("two", logged=True)
    assert stream.getvalue() == "two\n"


def test_the_table_has_each_link_and_each_kind_of_its_traffic() -> None:
    stream = io.StringIO()
    Console(file=stream, width=118).print(report.link_table(LINKS))
    shown = stream.getvalue()
    for part in ("forward 0→1", "backward 1→0", "first", "change", "4.40"):
        assert part in shown


@pytest.mark.parametrize(
    ("kinds", "noted"),
    [(["first"], True), (["first", "change"], False), (["first", "reseed"], False), (["value"], 0)],
)
def test_a_run_that_only_paid_first_visits_says_so(kinds: list[str], noted: bool) -> None:
    links = [link("forward", 1000) | {"kinds": {kind: {} for kind in kinds}}]
    note = report.first_visits_only({"links": links, "steps": 4})
    assert bool(note) == noted


def test_a_run_folder_is_claimed_by_one_run_only(tmp_path: Path) -> None:
    config = dataclasses.replace(Config(), out=str(tmp_path / "run"))
    metrics.create_folder(config)
    with pytest.raises(ConfigError, match="in use by another run"):
        metrics.create_folder(config)


def test_an_empty_folder_that_exists_is_claimed_like_a_new_one(tmp_path: Path) -> None:
    config = dataclasses.replace(Config(), out=str(tmp_path))
    assert metrics.create_folder(config) == tmp_path
    with pytest.raises(ConfigError, match="in use by another run"):
        metrics.create_folder(config)


def test_default_run_folders_never_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folders = {metrics.create_folder(Config()) for _ in range(3)}
    assert len(folders) == 3
    assert all("default-int8" in folder.name for folder in folders)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    metrics.write_json(file, {"loss": 1.0})
    with pytest.raises(ValueError, match="JSON compliant"):
        metrics.write_json(file, {"loss": float("nan")})
    assert json.loads(file.read_text()) == {"loss": 1.0}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
