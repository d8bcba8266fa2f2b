"""Which stages compute the same at each visit of a sample, and the proof that they do.

From the first stage on, those whose parameters are frozen are *constant*: for a sample that was
seen before, what the other end of the next link remembers is what they would compute again. So its
micro-batch rests: their forward does not run for it, and nothing is sent. That they are constant is

1. told when the pipeline is made: no parameter and no output of theirs takes part in the backward
   pass, and no module draws random numbers or counts what it sees;
2. watched while they run: a forward that draws random numbers all the same, or changes a parameter
   or a buffer, ends the rest of its stage and of those behind it for good;
3. checked before each step: what somebody has changed since the last one is an error, for the other
   ends remember what was.

A sample rests only where its input is that of its last visit, in this pipeline or in the one whose
checkpoint was loaded into it; then the stages must have the same weights as there.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from thinwire.boundary import Boundary
from thinwire.pipeline.inputs import Inputs

_LOG = logging.getLogger(__name__)
_MAKE_NEW = "make a new pipeline, or pass skip_frozen=False"


class Stage(Protocol):
    """What there is to know of a stage here."""

    submod: nn.Module
    stage_index: int
    device: torch.device
    outputs: list[Boundary]
    watch: Watch | None


def is_trainable(module: nn.Module) -> bool:
    """Whether a parameter of ``module`` is to learn."""
    return any(p.requires_grad for p in module.parameters())


def doubt(stage: Stage) -> str | None:
    """Why a stage may compute something else at a sample's next visit; None if nothing speaks for
    it, short of running it."""
    for name, parameter in stage.submod.named_parameters():
        if parameter.requires_grad:
            return f"parameter {name!r} requires a gradient"
    if any(boundary.requires_grad for boundary in stage.outputs):
        return "its output_args have requires_grad=True"
    for name, tensor in _tensors(stage.submod):
        if not _counts_changes(tensor):
            return f"{name!r} is no plain tensor, which counts its changes"
    for name, module in stage.submod.named_modules():
        why = _doubt_of(module)
        if why is not None:
            return f"module {name!r} ({type(module).__name__}) {why}"
    return None


def _doubt_of(module: nn.Module) -> str | None:
    """Why a module alone, without those in it, may not compute the same again."""
    if isinstance(module, DistributedDataParallel | FSDPModule):
        return "moves its parameters"
    if isinstance(module, nn.FractionalMaxPool2d | nn.FractionalMaxPool3d):
        return "draws random numbers"
    if isinstance(module, _BatchNorm) and module.running_mean is None:
        return "mixes the rows of a micro-batch"
    if not module.training:
        return None
    rate = 0.0
    if isinstance(module, _DropoutNd):
        rate = module.p
    elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        rate = module.dropout
    if rate > 0 or isinstance(module, nn.RReLU):
        return "draws random numbers in training mode"
    if isinstance(module, _BatchNorm):
        return "mixes the rows of a micro-batch in training mode"
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        return "counts what it sees in training mode"
    return None


def _counts_changes(tensor: Any) -> bool:
    return not (tensor.is_inference() or is_traceable_wrapper_subclass(tensor))


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


class Watch:
    """Sees whether a stage is as constant as it was found to be when the pipeline was made."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        #: Why the stage is not constant; None as long as nothing speaks for it.
        self.found = doubt(stage)
        #: The digest of the stage's tensors where a checkpoint was written, if one was loaded.
        self.expected: str | None = None
        self._digest: str | None = None
        self._tensors: dict[str, tuple[Tensor, int, int]] | None = None  # with version, address

    def changed(self) -> str | None:
        """What has been changed since the last step, in one line; None if nothing has.

        What was changed before the first step is no error, unless a checkpoint was loaded: nothing
        is remembered yet.
        """
        now, index = self._look(), self.stage.stage_index
        if self._tensors is None:
            if self.expected not in (None, self.digest()):
                return (
                    f"stage {index} is frozen, and its weights are not those of the checkpoint, "
                    f"which remembers what they computed: load them, {_MAKE_NEW}"
                )
            if is_trainable(self.stage.submod):
                return (
                    f"stage {index} was frozen when this pipeline was made, and its output_args "
                    "ask for no gradient; now it has parameters to train: make a new pipeline"
                )
            self._tensors = now
            self.found = self.found or doubt(self.stage)
            return None
        why = doubt(self.stage) or _difference(self._tensors, now)
        if why is None:
            return None
        return (
            f"stage {index} was frozen, and what it computed is remembered; since "
            f"the last step it is not: {why}; {_MAKE_NEW}"
        )

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The stage's forward runs meanwhile."""
        before = _random_state(self.stage.device)
        yield
        if self.found is None and _random_state(self.stage.device) != before:
            self.found = "its forward draws random numbers"

    def conclude(self) -> str | None:
        """A step is over: why the stage is not constant, or None."""
        now = self._look()
        if self.found is None and self._tensors is not None:
            self.found = _difference(self._tensors, now)
        self._tensors = now
        return self.found

    def digest(self) -> str:
        """A hash of all parameters and buffers: names, types, shapes and values."""
        if self._tensors is None or self._digest is None:
            hasher = xxhash.xxh3_64()
            for name, tensor in _tensors(self.stage.submod):
                hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
                values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
                hasher.update(values.numpy().data)
            self._digest = hasher.hexdigest()
        return self._digest

    def _look(self) -> dict[str, tuple[Tensor, int, int]]:
        return {
            name: (t, t._version, t.data_ptr()) if _counts_changes(t) else (t, -1, -1)
            for name, t in _tensors(self.stage.submod)
        }


def _difference(
    before: dict[str, tuple[Tensor, int, int]], after: dict[str, tuple[Tensor, int, int]]
) -> str | None:
    """Which tensor is not what it was."""
    for name in before.keys() | after.keys():
        if name not in before or name not in after:
            return f"{name!r} came or went"
        (one, *was), (other, *is_now) = before[name], after[name]
        if one is not other or was != is_now:
            return f"{name!r} has been changed"
    return None


def _random_state(device: torch.device) -> tuple[Any, ...]:
    """The state of every global generator that a forward may draw from."""
    numpy: Any = np.random.get_state(legacy=True)
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    found = [state.numpy().tobytes() for state in states]
    return (*found, random.getstate(), numpy[1].tobytes(), *numpy[2:])


class Frozen:
    """The stages, from the first on, that are constant as far as all ranks know.

    stages: this rank's. doubts: of each stage of the pipeline. edges: those whose receiver
    remembers what crosses them.
    """

    def __init__(
        self, stages: Sequence[Stage], doubts: Sequence[str | None], edges: Iterable[int]
    ) -> None:
        self._stages, self._edges, self._inputs = list(stages), list(edges), Inputs()
        #: The first stage that turned out not to be constant while it ran, if one has.
        self._broken: int | None = None
        constant = next((s for s, why in enumerate(doubts) if why), len(doubts))
        for stage in self._stages:
            stage.watch = Watch(stage) if stage.stage_index < constant else None
            if stage.stage_index == constant and constant in self._edges:
                _explain(stage, doubts[constant])
        self._retreat(constant)

    def _retreat(self, constant: int) -> None:
        """The first ``constant`` stages are constant, and no more."""
        #: How many stages are: edges below this one may rest.
        self.count = max((edge + 1 for edge in self._edges if edge < constant), default=0)
        for stage in self._stages:
            if stage.stage_index >= self.count:
                stage.watch = None

    @property
    def _watches(self) -> list[Watch]:
        return [stage.watch for stage in self._stages if stage.watch is not None]

    def known(
        self,
        boundaries: Sequence[Boundary],
        inputs: Sequence[Tensor],
        keys: Sequence[int] | None,
        lengths: Sequence[int] | None,
    ) -> str | None:
        """As ``Inputs.known``; None where nothing can rest."""
        if keys is None or not self.count:
            return None
        return self._inputs.known(boundaries, inputs, keys, lengths)

    def changed(self) -> str | None:
        """What has been changed in this rank's stages since the last step; None if nothing has."""
        found = [watch.changed() for watch in self._watches]
        return next((why for why in found if why), None)

    def accept(self) -> None:
        """The step takes place."""
        self._inputs.accept()

    def report(self) -> int:
        """At the end of a step: the first of this rank's stages that is not constant, else -1."""
        broken = [
            (watch.stage.stage_index, why)
            for watch in self._watches
            if (why := watch.conclude()) is not None
        ]
        if not broken:
            return -1
        index, why = min(broken)
        _LOG.warning("stage %d is frozen, but %s: its forward is not skipped", index, why)
        return index

    def conclude(self, reports: Iterable[int]) -> None:
        """All ranks' reports are there."""
        broken = [index for index in reports if index >= 0]
        if broken:
            self._broken = min(broken)
            self._retreat(self._broken)

    # Checkpoints.

    def state(self) -> dict[str, Any]:
        """What this rank has found out, as JSON values; ``inputs`` are apart."""
        return {
            "broken": self._broken,
            "weights": {str(watch.stage.stage_index): watch.digest() for watch in self._watches},
        }

    @property
    def inputs(self) -> dict[str, Tensor] | None:
        """The samples that have been seen, as ``Inputs.save`` has them; None where none has."""
        found = self._inputs.save() if self.count else {}
        return found if found and found["keys"].numel() else None

    def expect(self, weights: Mapping[str, str]) -> None:
        """At the first step the stages must have the weights of ``state``."""
        for watch in self._watches:
            watch.expected = weights.get(str(watch.stage.stage_index))

    def load_inputs(self, inputs: Mapping[str, Tensor]) -> None:
        """Go on from ``inputs``; raises ValueError where they are nothing of that kind."""
        if self.count:
            self._inputs.load(inputs)


def _explain(stage: Stage, why: str | None) -> None:
    """Say why a stage that looks frozen runs at each visit."""
    if not is_trainable(stage.submod):
        index = stage.stage_index
        _LOG.warning("stage %d is frozen, but %s: its forward is not skipped", index, why)
