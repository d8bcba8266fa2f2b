"""The task of a small GPT on text: bytes are tokens, and the next one is to be predicted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.train.config import Config, ConfigError, shortened
from thinwire.train.size import check_size
from thinwire.train.task import Data, Model, Task, limits
from thinwire.train.words import counted

if TYPE_CHECKING:
    import thinwire as tw
    from thinwire.train.batches import Split


class Language(Task):
    """A GPT on the bytes of files; ``data`` and ``model`` do the work."""

    unit, noun = "tokens", "text"
    other_data = "the text is not the one that it was trained on"
    path = "a text file or a folder"
    context = frozenset({"token", "target"})
    to_lower = "--model.dim, --model.layers, --model.context or --train.batch"

    def check(self, config: Config) -> None:
        model = config.model
        if model.dim % model.heads:
            raise ConfigError(
                f"model.dim {model.dim} is no multiple of model.heads {model.heads}; change either"
            )
        if config.train.frozen > model.layers:
            raise ConfigError(
                f"train.frozen is {shortened(config.train.frozen)} but model.layers "
                f"{model.layers}: nothing would be left to train; with {model.layers} the head "
                "alone is trained"
            )

    def blocks(self, config: Config) -> int:
        return config.model.layers

    def check_stages(self, config: Config) -> None:
        stages, layers = config.num_stages, config.model.layers
        if stages > layers:
            raise ConfigError(
                f"{counted(stages, 'stage')} but model.layers is {layers}: a stage needs "
                "a layer; lower --nproc or --pipeline.stages, or raise --model.layers"
            )

    def check_size(self, config: Config, local_processes: int) -> None:
        check_size(config, local_processes)

    def more_compute(self, config: Config) -> str:
        return f"--model.layers {2 * config.model.layers}"

    def load(self, config: Config) -> Data:
        from thinwire.train import data

        return data.load(config.data, config.model.context)

    def check_samples(self, config: Config, data: Data, count: int) -> None:
        if count < config.pipeline.microbatches:
            raise ConfigError(
                f"{data.source}: {counted(count, 'sample')} of training text, fewer than the "
                f"{config.pipeline.microbatches} micro-batches of a step; give more text or lower "
                "--model.context"
            )

    def split(self, config: Config, data: Data) -> Split:
        from thinwire.train.batches import Split
        from thinwire.train.data import Samples, Text

        assert isinstance(data, Text)
        train, held = limits(config)
        training = Samples(data.train, config.model.context, train)
        return Split(training, Samples(data.validation, config.model.context, held))

    def model(self, config: Config, data: Data) -> Model:
        from thinwire.train.model import Gpt

        return Gpt(config)

    def loss(self) -> tw.TokenLoss:
        import thinwire as tw
        from thinwire.train.batches import IGNORED

        return tw.TokenLoss(IGNORED)
