"""What is trained, as everything else here sees it: a task, with its data and its models.

A task brings together what depends on each other: which data are read, which models take them, how
they are cut into stages, and the loss. ``tasks`` knows which there are; a further one is a class of
this kind. Nothing here needs torch before data are read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

_QUICK = 256, 64  # samples to train, and to validate and test on, with --quick

if TYPE_CHECKING:
    from torch import Tensor, nn

    import thinwire as tw
    from thinwire.train.batches import Split
    from thinwire.train.config import Config
    from thinwire.train.stage import Stage


def limits(config: Config) -> tuple[int | None, int | None]:
    """At most how many samples to train on, and to validate and test on."""
    trained, held = _QUICK if config.train.quick else (None, None)
    return config.train.samples or trained, held


class Data(ABC):
    """All data of a run, the same on every rank.

    ``sha256``: over all that is trained and evaluated on, in hexadecimal. ``skipped``: why files
    were left out, and how many.
    """

    sha256: str
    source: str
    skipped: Mapping[str, int]

    @property
    def described(self) -> str:
        """What they are, as a run's first lines say it."""
        return self.source

    @property
    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What a summary says of them beside source and digest, as JSON values."""


class Model(ABC):
    """A model with the cuts, the frozen blocks and the seed of a run.

    An edge has the number of the stage before it.
    """

    #: Whether its forward draws random numbers in training.
    draws: bool

    @property
    @abstractmethod
    def parameters(self) -> int:
        """How many the whole model has, each once."""

    @property
    @abstractmethod
    def frozen(self) -> str:
        """What of it is frozen, in words."""

    @abstractmethod
    def stages(self, indices: Sequence[int]) -> list[Stage]:
        """Some of its stages on the CPU, with the weights that any other split starts from."""

    @abstractmethod
    def inputs(self, rows: int) -> Tensor:
        """What enters the first stage of a micro-batch of ``rows`` samples, on the meta device."""

    @abstractmethod
    def boundary(self, edge: int, rows: int) -> Tensor:
        """What crosses an edge; it requires a gradient unless all before it is frozen."""

    @abstractmethod
    def outputs(self, rows: int) -> Tensor:
        """What leaves the last stage, for the loss."""

    @abstractmethod
    def named_tensors(self, stages: Sequence[Stage]) -> dict[str, Tensor]:
        """The parameters and buffers of some stages by global name, whatever the cuts."""

    def tied(self, stages: Sequence[Stage]) -> dict[str, nn.Parameter]:
        """Those parameters of this process that stages of others share, by name."""
        return {}

    def arguments(self, stage_index: int, num_stages: int, rows: int) -> tuple[Tensor, Tensor]:
        """Input and output of a stage for one micro-batch of ``rows`` samples."""
        last = num_stages - 1
        return (
            self.inputs(rows) if stage_index == 0 else self.boundary(stage_index - 1, rows),
            self.outputs(rows) if stage_index == last else self.boundary(stage_index, rows),
        )

    def values(self, edge: int) -> int:
        """Values of a sample that cross an edge."""
        return self.boundary(edge, 1).numel()

    def has_gradients(self, edge: int) -> bool:
        """Whether gradients cross an edge: not where nothing before it is to learn."""
        return self.boundary(edge, 1).requires_grad


class Task(ABC):
    """One kind of training. Errors that a user can correct are ``ConfigError``s of one line."""

    #: What throughput is counted in, and what the data are called.
    unit: ClassVar[str]
    noun: ClassVar[str]
    #: How a run says that it finds other data than those that it was trained on.
    other_data: ClassVar[str]
    #: What ``data.path`` names.
    path: ClassVar[str]
    #: The samples that a micro-batch needs at least.
    least_rows: ClassVar[int] = 1
    #: What both ends of a link know of a batch, and may predict by.
    context: ClassVar[frozenset[str]]
    #: The settings to lower where memory is short.
    to_lower: ClassVar[str]

    # What follows from the settings alone.

    @abstractmethod
    def check(self, config: Config) -> None:
        """Refuse settings of model and data that do not fit each other."""

    @abstractmethod
    def blocks(self, config: Config) -> int:
        """Between so many blocks the model can be cut."""

    @abstractmethod
    def check_stages(self, config: Config) -> None:
        """Refuse a number of stages that the model has not, once it is known."""

    def cut_into(self, config: Config) -> int | None:
        """How many stages the cuts that were named make; None where none were."""
        return None

    def cut_at(self, config: Config) -> tuple[int, ...]:
        """What tells two cuts into as many stages apart."""
        return ()

    def check_size(self, config: Config, local_processes: int) -> None:  # noqa: B027  optional
        """Refuse what cannot fit into this machine's memory, ``local_processes`` being on it."""

    @abstractmethod
    def more_compute(self, config: Config) -> str:
        """The option to type for more compute behind the same link."""

    # With torch.

    @abstractmethod
    def load(self, config: Config) -> Data:
        """Read and check the data."""

    @abstractmethod
    def check_samples(self, config: Config, data: Data, count: int) -> None:
        """Refuse too few samples to train on; there are ``count``."""

    @abstractmethod
    def split(self, config: Config, data: Data) -> Split:
        """The samples of a run."""

    @abstractmethod
    def model(self, config: Config, data: Data) -> Model:
        """The model of a resolved configuration."""

    @abstractmethod
    def loss(self) -> tw.TokenLoss:
        """Sums over what counts, divided by its number in the batch."""
