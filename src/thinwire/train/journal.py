"""What rank 0 keeps of a run while it trains: times, metrics and the live line."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import thinwire as tw
from thinwire.train import ranks
from thinwire.train.build import Run
from thinwire.train.evaluation import Evaluation
from thinwire.train.metrics import MetricsWriter, read_metrics
from thinwire.train.report import LiveLine, progress_line


@dataclass
class Clock:
    """Seconds that this rank spent in training steps, by what it did; evaluation left out.

    ``cpu_s`` is the CPU time of the whole process, ``codec_s`` that of coding alone; the others
    are of the clock on the wall. ``steps`` and ``tokens``, or images, are those that were timed.
    """

    steps: int = 0
    tokens: int = 0
    step_s: float = 0.0
    cpu_s: float = 0.0
    compute_s: float = 0.0
    codec_s: float = 0.0
    wait_s: float = 0.0
    link_s: float = 0.0
    steps_ms: list[float] = field(default_factory=list)

    def add(
        self, tokens: int, step_s: float, cpu_s: float, link_s: float, timers: dict[str, float]
    ) -> None:
        """Count a step; ``timers`` are the pipeline's, with the ``optimizer_s`` beside them."""
        self.steps += 1
        self.tokens += tokens
        self.step_s += step_s
        self.cpu_s += cpu_s
        self.compute_s += timers["compute_s"] + timers["optimizer_s"]
        self.codec_s += timers["encode_s"] + timers["decode_s"]
        self.wait_s += timers["wait_s"]
        self.link_s += link_s
        self.steps_ms.append(1e3 * step_s)

    @property
    def median_ms(self) -> float:
        """Of a step; the mean where single steps are not known any more."""
        return statistics.median(self.steps_ms or [1e3 * self.step_s / self.steps])

    def sums(self) -> dict[str, float]:
        """The seconds by name."""
        names = ("step_s", "cpu_s", "compute_s", "codec_s", "wait_s", "link_s")
        return {name: getattr(self, name) for name in names}

    def of_all_ranks(self) -> list[dict[str, float]]:
        """The sums of every rank, gathered over the default process group."""
        return ranks.gather_json(self.sums())


@dataclass
class Saved:
    """The checkpoints of a run so far: their number, bytes on all ranks, and seconds they took."""

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        self.count += 1
        self.bytes += nbytes
        self.seconds += seconds


def split_reports(pipeline: tw.Pipeline) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The counters of the links, and those of control messages; gathered, so all ranks call it."""
    reports = pipeline.link_reports()
    return [r for r in reports if r["edge"] >= 0], [r for r in reports if r["edge"] < 0]


class Journal:
    """Notes each step: a line in ``metrics.jsonl``, the live line, the clock.

    Every rank keeps one, since gathering counters takes them all; only rank 0 writes and shows.
    """

    def __init__(
        self,
        run: Run,
        folder: Path | None,
        screen: Console,
        done: int = 0,
    ) -> None:
        self.clock = Clock()
        self.checkpoints = Saved()
        self.tokens = 0
        self.loss = math.nan  # of the last step
        self._pipeline, self._busy_s, self._unit = run.pipeline, run.busy_s, run.task.unit
        self._writer = None if folder is None else MetricsWriter(folder, done)
        for record in read_metrics(folder) if folder is not None else []:
            if "checkpoint" in record:
                saved = record["checkpoint"]
                self.checkpoints.add(saved["bytes"], saved["seconds"])
        self._live = LiveLine(screen)
        self._screen = screen
        self._steps, self._epochs = run.steps, run.epochs
        self._links: list[dict[str, Any]] = []
        self._logged = (0, 0.0)  # tokens and step seconds at the last log

    def __enter__(self) -> Journal:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, trace)
        if self._writer is not None:
            self._writer.close()

    def begin_step(self) -> None:
        self._link_s = self._busy_s() if self._busy_s else 0.0
        self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def begin_optimizer(self) -> None:
        self._stepped = time.perf_counter()

    def end_step(
        self,
        step: int,
        epoch: int,
        lr: float,
        result: tw.StepResult,
        logged: bool,
        measured: bool = False,
    ) -> None:
        """Note step number ``step``; ``logged`` also reads the links' counters, on every rank, and
        ``measured`` what coding has lost."""
        ended = time.perf_counter()
        step_s, cpu_s = ended - self._began, time.process_time() - self._cpu_began
        timers = self._pipeline.take_timers() | {"optimizer_s": ended - self._stepped}
        link_s = self._busy_s() - self._link_s if self._busy_s else 0.0
        self.clock.add(result.tokens, step_s, cpu_s, link_s, timers)
        self.tokens += result.tokens
        self.loss = result.loss
        if logged:
            self._links, _ = split_reports(self._pipeline)
        self._show(step, epoch, result, logged)
        record = {
            "step": step,
            "epoch": epoch,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            self._unit: result.tokens,
            f"{self._unit}_per_s": result.tokens / step_s,
            "step_ms": 1e3 * step_s,
            "timers_ms": {name.removesuffix("_s"): 1e3 * s for name, s in timers.items()},
        }
        if logged:
            kept = ("edge", "direction", "messages", "rested", "payload_bytes", "header_bytes")
            record["links"] = [{name: link[name] for name in kept} for link in self._links]
            self._logged = (self.tokens, self.clock.step_s)
        if measured:
            record["fidelity"] = self._pipeline.fidelity_reports()
        self._write(record)

    def end_epoch(self, step: int, epoch: int, validated: Evaluation) -> None:
        """Note what validation, codec on, gave at the end of an epoch."""
        self._screen.print(f"epoch {epoch}: validation loss {validated} with the codec on")
        record: dict[str, Any] = {"step": step, "epoch": epoch, "val_loss_codec": validated.loss}
        if validated.accuracy is not None:
            record["val_accuracy_codec"] = validated.accuracy
        self._write(record)

    def end_checkpoint(self, step: int, nbytes: int, seconds: float) -> None:
        """Note a checkpoint: its bytes on all ranks, and the seconds that it took."""
        self.checkpoints.add(nbytes, seconds)
        self._write({"step": step, "checkpoint": {"bytes": nbytes, "seconds": seconds}})

    def sync(self) -> None:
        """Have what was written on the disk before going on."""
        if self._writer is not None:
            self._writer.sync()

    def state(self) -> dict[str, Any]:
        """What ``restore`` takes, as JSON values."""
        return {
            "tokens": self.tokens,
            "loss": self.loss,
            "clock": {**self.clock.sums(), "steps": self.clock.steps, "tokens": self.clock.tokens},
        }

    @property
    def steps_ms(self) -> Tensor:
        """Milliseconds of each timed step, 1-D float64."""
        return torch.tensor(self.clock.steps_ms, dtype=torch.float64)

    def restore(self, state: Mapping[str, Any], steps_ms: Sequence[float]) -> None:
        """Go on from ``state`` and ``steps_ms``."""
        self.tokens, self.loss = state["tokens"], state["loss"]
        self.clock = Clock(**state["clock"], steps_ms=list(steps_ms))
        self._logged = (self.tokens, self.clock.step_s)

    def _show(self, step: int, epoch: int, result: tw.StepResult, logged: bool) -> None:
        tokens, seconds = self._logged
        line = progress_line(
            epoch=f"{epoch}/{self._epochs}",
            step=f"{step}/{self._steps}",
            loss=result.loss,
            unit=self._unit,
            per_s=(self.tokens - tokens) / (self.clock.step_s - seconds),
            links=self._links,
            busy=self.clock.link_s / self.clock.step_s if self._busy_s else None,
        )
        self._live.show(line, logged)

    def _write(self, record: dict[str, Any]) -> None:
        if self._writer is not None:
            self._writer.write(record)
