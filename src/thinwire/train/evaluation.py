"""Evaluation: the mean loss of samples that are not trained on, and where they are labelled, the
accuracy."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.train.batches import Samples, evaluation_batches
from thinwire.train.build import Run


@dataclass(frozen=True)
class Evaluation:
    """``loss`` of what counts, in nats; ``accuracy`` from 0 to 1, None where none is told."""

    loss: float
    accuracy: float | None

    def __str__(self) -> str:
        return reached(self.loss, self.accuracy)


def reached(loss: float, accuracy: float | None) -> str:
    """``0.4210 (accuracy 85.42 %)``; the loss alone where there is no accuracy."""
    return f"{loss:.4f}" + ("" if accuracy is None else f" (accuracy {100 * accuracy:.2f} %)")


def evaluate(run: Run, samples: Samples, codec: bool) -> Evaluation:
    """Evaluate ``samples`` with the plan's codecs on the links or without."""
    config, device = run.config, run.place.device
    loss_sum, count, correct = 0.0, 0, 0
    for batch in evaluation_batches(samples, config.train.batch, config.pipeline.microbatches):
        part = run.sized(batch, samples)
        result = run.pipeline.eval(
            part.inputs.to(device),
            target=part.target.to(device),
            lengths=part.lengths,
            codec=codec,
            context=run.context_of(part) if codec else None,
        )
        loss_sum, count = loss_sum + result.loss_sum, count + result.tokens
        correct += result.correct or 0
    run.pipeline.take_timers()  # starts them anew: evaluation is no part of a step
    return Evaluation(loss_sum / count, None if result.correct is None else correct / count)


def final_numbers(run: Run) -> dict[str, float]:
    """What a run has reached, as its summary names it: of validation and test samples the loss,
    codec off and on, and the accuracy where there is one."""
    found = {}
    for name, samples in run.samples.parts.items():
        for ending, codec in (("", False), ("_codec", True)):
            one = evaluate(run, samples, codec)
            found[f"{name}_loss{ending}"] = one.loss
            if one.accuracy is not None:
                found[f"{name}_accuracy{ending}"] = one.accuracy
    return found
