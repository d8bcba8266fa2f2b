"""Pipelines: torch's schedules over stages that are joined by compressed edges."""

from thinwire.pipeline.engine import (
    SCHEDULES,
    build_schedule,
    check_microbatches,
    stages_of_rank,
)
from thinwire.pipeline.loss import ClassLoss, TokenLoss
from thinwire.pipeline.pipeline import Pipeline
from thinwire.pipeline.plan import OFF, Plan, default_forward
from thinwire.pipeline.remembered import Storage
from thinwire.pipeline.result import EvalResult, StepResult
from thinwire.pipeline.stage import PipelineStage

__all__ = [
    "OFF",
    "SCHEDULES",
    "ClassLoss",
    "EvalResult",
    "Pipeline",
    "PipelineStage",
    "Plan",
    "StepResult",
    "Storage",
    "TokenLoss",
    "build_schedule",
    "check_microbatches",
    "default_forward",
    "stages_of_rank",
]
