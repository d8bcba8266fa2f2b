"""What a run shows: the line while it trains, its numbers, and the table of its links."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text as Line

import thinwire as tw
from thinwire.counters import link_name
from thinwire.train.batches import Split
from thinwire.train.build import may_rest
from thinwire.train.config import Config, link_rate
from thinwire.train.evaluation import reached
from thinwire.train.storage import disk_sentence, no_room, remembers, slow_disk
from thinwire.train.task import Data, Model
from thinwire.train.tasks import task_of
from thinwire.train.words import counted, listed

_PLAIN_WIDTH = 118  # without a terminal rich would wrap the tables at 80 columns
_REFRESH_S = 0.2


class _Console(Console):
    """rich's, but it leaves to its caller that the other end of a pipe is gone."""

    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704  the BrokenPipeError, of which this is called


def console(to_stderr: bool, quiet: bool = False) -> Console:
    """Where a run talks to: stdout, stderr with ``--json``, nowhere on ranks other than 0."""
    stream = sys.stderr if to_stderr else sys.stdout
    width = None if stream.isatty() else _PLAIN_WIDTH
    return _Console(file=stream, width=width, quiet=quiet, highlight=False)


def note(config: Config, quiet: bool = False) -> Callable[[str], None]:
    """Shows a line where a run talks to."""
    screen = console(config.json, quiet)
    return lambda line: screen.print(line, soft_wrap=True, markup=False)


class LiveLine:
    """One line that is rewritten on a terminal; elsewhere a plain line for each log interval."""

    def __init__(self, screen: Console) -> None:
        self._screen = screen
        self._live = Live(console=screen, auto_refresh=False) if screen.is_terminal else None
        self._shown = 0.0

    def __enter__(self) -> LiveLine:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, line: str, logged: bool) -> None:
        """Show the line; ``logged`` marks the end of a log interval."""
        if self._live is None:
            if logged:
                self._screen.print(line, soft_wrap=True, markup=False)
        elif logged or time.perf_counter() - self._shown >= _REFRESH_S:
            self._shown = time.perf_counter()
            self._live.update(Line(line, overflow="ellipsis", no_wrap=True), refresh=True)


def progress_line(
    *,
    epoch: str,
    step: str,
    loss: float,
    unit: str,
    per_s: float,
    links: list[dict[str, Any]],
    busy: float | None,
) -> str:
    """The text of the live line.

    ``epoch`` and ``step`` read ``"3/10"``; ``busy`` is the link's busy share of the time, 0 to 1.
    """
    sent = sent_bytes(links)
    raw = sum(link["raw_bytes"] for link in links)
    ratio = f"{raw / sent:.1f}x less than fp32" if sent else "nothing crossed a link"
    return (
        f"epoch {epoch}  step {step}  loss {loss:.4f}  "
        f"{per_s:,.0f} {unit}/s  {sent / 1e6:.1f} MB sent  {ratio}  "
        f"link {'–' if busy is None else f'{100 * busy:.0f} %'} busy"
    )


def sent_bytes(links: list[dict[str, Any]]) -> int:
    """Payload and header bytes over all links."""
    return sum(link["payload_bytes"] + link["header_bytes"] for link in links)


def opening(config: Config, data: Data, samples: Split, model: Model, steps: int) -> str:
    """The lines with which a run begins: what is trained, on what data, over which links."""
    pipeline, link = config.pipeline, config.link
    task, training_samples = task_of(config), len(samples.training)
    left_out = training_samples % config.train.batch
    counts = [f"{counted(training_samples, 'sample')} to train"]
    counts += [f"{len(samples.validation):,} to validate"]
    counts += [] if samples.test is None else [f"{len(samples.test):,} to test"]
    emulated = f"{link.rate}, {link.latency}, emulated"
    if link_rate(link) is None:
        emulated = "not emulated"
    shown = (
        f"model: {model.parameters:,} parameters in {shape_text(config)}\n"
        f"{task.noun}: {data.described}, {listed(counts)}, sha256 {data.sha256[:12]}\n"
        f"links: {link.transport}, {emulated}; forward {config.plan.forward}, "
        f"backward {config.plan.backward}\n"
        f"training: {counted(steps, 'step')} of {counted(config.train.batch, 'sample')} on "
        f"{config.device}"
    )
    if config.train.frozen:
        shown += f"; {model.frozen} frozen"
        variants = samples.training.variants
        recurs = 0 < variants * training_samples < steps * config.train.batch
        if recurs and may_rest(config, model) and not remembers(config.plan.forward):
            shown += f"\nnote: no frozen stage can rest: {config.plan.forward} remembers no samples"
    if not samples.training.variants and remembers(config.plan.forward):
        shown += (
            f"\nnote: {config.plan.forward} meets no sample again, since each epoch has new "
            "variants of all; set --data.variants, as 4, or --forward tile"
        )
    if data.skipped:
        reasons = ", ".join(f"{number:,} {why}" for why, number in data.skipped.items())
        shown += f"\nnote: files skipped in {data.source}: {reasons}"
    if 0 < left_out < task.least_rows * pipeline.microbatches:
        shown += (
            f"\nnote: each epoch leaves out {counted(left_out, 'sample')}, too few for "
            f"{pipeline.microbatches} micro-batches, others each time"
        )
    return shown


def shape_text(config: Config) -> str:
    """The stages of a resolved configuration, their processes, and how these work."""
    pipeline = config.pipeline
    return (
        f"{counted(config.num_stages, 'stage')} on {counted(config.nproc or 1, 'process')}; "
        f"{pipeline.schedule}, {counted(pipeline.microbatches, 'micro-batch')}"
    )


def closing(screen: Console, summary: dict[str, Any], folder: Path) -> None:
    """What a run shows at its end: links, validation losses, and what bounded it."""
    screen.print()
    if summary["links"]:
        screen.print(link_table(summary["links"]))
    for part, name in (("val", "validation"), ("test", "test")):
        if f"{part}_loss" in summary:
            off, on = (
                reached(summary[f"{part}_loss{codec}"], summary.get(f"{part}_accuracy{codec}"))
                for codec in ("", "_codec")
            )
            screen.print(f"{name} loss {off} with the codec off, {on} with it on", soft_wrap=True)
    if bits := bits_sentence(summary):
        screen.print(bits, soft_wrap=True, markup=False)
    if gains := gains_sentence(summary["links"]):
        screen.print(gains, soft_wrap=True, markup=False)
    screen.print(summary["bound"]["sentence"], soft_wrap=True, markup=False)
    if line := slow_disk(summary["references"], summary["train_s"]):
        screen.print(line, soft_wrap=True, markup=False)
    if line := no_room(summary):
        screen.print(line, soft_wrap=True, markup=False)
    screen.print(disk_sentence(summary), soft_wrap=True, markup=False)
    if summary["links"]:
        screen.print(compression_sentence(summary["cpu"]), soft_wrap=True, markup=False)
    if note := rest_sentence(summary["links"]):
        screen.print(note, soft_wrap=True, markup=False)
    if note := first_visits_only(summary):
        screen.print(note, soft_wrap=True, markup=False)
    if note := part_of_the_model(summary["config"]["plan"]["forward"]):
        screen.print(f"note: {note}", soft_wrap=True, markup=False)
    screen.print(f"run folder: {folder}", soft_wrap=True, markup=False)


def part_of_the_model(forward: str) -> str | None:
    """What there is to know of a forward scheme that is a part of what the model computes."""
    if forward == "off" or not tw.scheme(forward).sparse:
        return None
    return (
        f"the model was trained with {forward} between its stages, which is a part of what it "
        "computes: with the codec off it is another model. Use it as trained, or recalibrate it "
        "where it has batch normalization."
    )


def bits_sentence(summary: dict[str, Any]) -> str | None:
    """Average bits over the whole run, and how many visits were of remembered samples."""
    bits = {d: b for d, b in summary["bits_per_value"].items() if b is not None}
    if not bits:
        return None
    text = "Over the whole run: " + ", ".join(f"{b:.2f} bits a value {d}" for d, b in bits.items())
    rates = [link["hit_rate"] for link in summary["links"] if link["hit_rate"]]
    return f"{text}; {100 * min(rates):.0f} % of visits remembered." if rates else f"{text}."


def gains_sentence(links: list[dict[str, Any]]) -> str | None:
    """How much less there was to send by what both ends expected; None where nothing was, or where
    it was not measured."""
    told = []
    for link in links:
        gains = [f"{kind} {db:.1f}" for kind, db in link["gain_db"].items()]
        if gains:
            told.append(f"{link_name(link['edge'], link['direction'])} {', '.join(gains)}")
    if not told:
        return None
    return f"Expected by both ends, in dB (6 are a bit a value): {'; '.join(told)}."


def compression_sentence(cpu: list[dict[str, float]]) -> str:
    """What compression cost the rank that it cost most, from a summary's ``cpu``."""
    most = max(cpu, key=lambda rank: rank["codec_share"])
    return (
        f"Compression took {100 * most['codec_share']:.1f} % of a rank's CPU time: "
        f"{most['codec_ms']:.1f} ms of {most['step_ms']:.0f} ms a step."
    )


def rest_sentence(links: list[dict[str, Any]]) -> str | None:
    """How many messages frozen stages were spared; None if none was."""
    forward = [link for link in links if link["direction"] == "forward"]
    rested = sum(link["rested"] for link in forward)
    if not rested:
        return None
    total = rested + sum(link["messages"] for link in forward)
    return (
        f"Of {total:,} messages forward {rested:,} were neither computed nor sent: the stages "
        "before them are frozen, and the receiver remembers what they would say."
    )


def first_visits_only(summary: dict[str, Any]) -> str | None:
    """A note where a scheme that sends changes has not sent one yet; else None."""
    kinds = [link["kinds"].keys() for link in summary["links"]]
    changes = any(k & {"change", "second", "reseed"} for k in kinds) or rest_sentence(
        summary["links"]
    )
    if not any("first" in k for k in kinds) or changes:
        return None
    return (
        f"note: no sample was visited twice in {counted(summary['steps'], 'step')}, so only "
        "first visits were sent; traffic and speed of later epochs are not shown here"
    )


def link_table(links: list[dict[str, Any]]) -> Table:
    """A row for each link, below it one for each kind of its traffic; fits 80 columns."""
    table = new_table("What crossed the links, in MB and bits per value", "link")
    for heading in ("messages", "payload", "header", "bits", "steady", "x fp32", "x bf16"):
        table.add_column(heading, justify="right", no_wrap=True)
    for link in links:
        steady = link["steady_bits_per_value"]
        name = f"{link_name(link['edge'], link['direction'])} {link['codec']}"
        table.add_row(name, *_cells(link, "–" if steady is None else f"{steady:.2f}"))
        for kind, part in link["kinds"].items():
            table.add_row(f"  {kind}", *_cells(part, ""), style="dim")
        if link["rested"]:
            table.add_row("  rested", f"{link['rested']:,}", style="dim")
    return table


def _cells(traffic: dict[str, Any], steady: str) -> list[str]:
    """The cells of one row after its name; ``steady`` is that of the column of the same name."""
    sent = [
        f"{traffic['messages']:,}",
        f"{traffic['payload_bytes'] / 1e6:.2f}",
        f"{traffic['header_bytes'] / 1e6:.3f}",
    ]
    if not traffic["values"]:
        return sent
    bits = 8 * (traffic["payload_bytes"] + traffic["header_bytes"]) / traffic["values"]
    return [
        *sent,
        f"{bits:.2f}",
        steady,
        f"{32 / bits:.2f}",
        f"{16 / bits:.2f}",
    ]


def new_table(title: str, first_column: str) -> Table:
    """An empty table in the style of all, whose first column may wrap."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    made.add_column(first_column, overflow="fold")
    return made
