"""The task of convolutional networks on images: each has one label, which is to be predicted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.train.config import Config, ConfigError, shortened
from thinwire.train.size import physical_memory
from thinwire.train.task import Data, Model, Task, limits
from thinwire.train.vision.architecture import BLOCKS, kept
from thinwire.train.vision.cuts import parse, stops
from thinwire.train.words import counted

if TYPE_CHECKING:
    import thinwire as tw
    from thinwire.train.batches import Split

_DEEPER = {"resnet8": "resnet20", "resnet10": "resnet20", "resnet20": "resnet18"}


class Vision(Task):
    """A ResNet on images; ``images`` and ``resnet`` do the work."""

    unit, noun = "images", "images"
    other_data = "the images are not those that it was trained on"
    path = "a folder of images"
    context = frozenset({"target"})
    least_rows = 2  # of a single one BatchNorm has no statistics worth the name
    to_lower = "--train.batch, --data.size, or take a smaller --model.kind"

    def check(self, config: Config) -> None:
        kind, train, data = config.model.kind, config.train, config.data
        if data.path is None:
            raise ConfigError(
                f"model.kind {kind} trains on images; name their folder with --data.path"
            )
        if data.variants and data.augment == "none":
            raise ConfigError(
                f"data.variants is {data.variants}, but data.augment is none; set --data.augment "
                "crop-flip, or leave --data.variants out"
            )
        blocks = len(BLOCKS[kind])
        if train.frozen > blocks:
            raise ConfigError(
                f"train.frozen is {shortened(train.frozen)} but {kind} has {blocks} blocks: "
                f"nothing would be left to train; with {blocks} the head alone is trained"
            )
        stages, cut_into = config.pipeline.stages, self.cut_into(config)
        if cut_into is not None and stages not in (None, cut_into):
            raise ConfigError(
                f"pipeline.cuts {config.pipeline.cuts} makes {cut_into} stages, but "
                f"pipeline.stages is {stages}; leave one of them out"
            )

    def cut_into(self, config: Config) -> int | None:
        cuts = config.pipeline.cuts
        return None if cuts is None else len(parse(cuts, config.model.kind)) + 1

    def cut_at(self, config: Config) -> tuple[int, ...]:
        return stops(config)

    def blocks(self, config: Config) -> int:
        return len(BLOCKS[config.model.kind])

    def check_stages(self, config: Config) -> None:
        kind, stages, blocks = config.model.kind, config.num_stages, self.blocks(config)
        if stages > blocks:
            raise ConfigError(
                f"{counted(stages, 'stage')} but {kind} has {blocks} blocks: a stage needs a "
                "block; lower --nproc or --pipeline.stages, or take a deeper --model.kind"
            )
        batch, parts = config.train.batch, config.pipeline.microbatches
        if parts <= batch < self.least_rows * parts:
            raise ConfigError(
                f"train.batch {batch} in {counted(parts, 'micro-batch')} leaves one image to some, "
                "but BatchNorm needs two; raise --train.batch or lower --pipeline.microbatches"
            )

    def more_compute(self, config: Config) -> str:
        deeper = _DEEPER.get(config.model.kind)
        # a later cut: fewer values cross it
        return f"--model.kind {deeper}" if deeper else "--pipeline.cuts layer3"

    def load(self, config: Config) -> Data:
        from thinwire.train.vision import images

        found = images.load(config.data)
        self._check_activations(config, *found.shape[1:])
        return found

    def _check_activations(self, config: Config, height: int, width: int) -> None:
        """Refuse images of a size at which one micro-batch already exceeds this machine's memory,
        shared out among the processes; on a GPU it is the GPU that tells."""
        memory, rows = physical_memory(), config.microbatch_rows
        needed = 4 * rows * kept(config.model.kind, height, width) // (config.nproc or 1)
        if memory is not None and config.device == "cpu" and needed > memory:
            raise ConfigError(
                f"{counted(rows, 'image')} of {height}×{width} in a micro-batch need "
                f"{needed / 1e9:,.1f} GB for activations in each process, but this machine has "
                f"{memory / 1e9:,.1f} GB; lower {self.to_lower}, or raise --pipeline.microbatches"
            )

    def check_samples(self, config: Config, data: Data, count: int) -> None:
        parts = config.pipeline.microbatches
        least = self.least_rows * parts
        if count < least:
            raise ConfigError(
                f"{data.source}: {counted(count, 'image')} to train on, fewer than the {least} of "
                f"a step of {parts} micro-batches; give more images or lower "
                "--pipeline.microbatches"
            )

    def split(self, config: Config, data: Data) -> Split:
        import torch

        from thinwire.train.batches import Split
        from thinwire.train.vision.images import Augmentation, Images, Samples

        assert isinstance(data, Images)
        train, held = limits(config)
        augmentation = None
        if config.data.augment != "none":
            augmentation = Augmentation(config.train.seed, config.data.variants)
        test = None
        if data.test is not None:
            test = Samples(data.test, torch.arange(len(data.test.labels)), data.scale, limit=held)
        return Split(
            Samples(data.train, data.training, data.scale, augmentation, train),
            Samples(data.train, data.validation, data.scale, limit=held),
            test,
        )

    def model(self, config: Config, data: Data) -> Model:
        from thinwire.train.vision.images import Images
        from thinwire.train.vision.resnet import ResNet

        assert isinstance(data, Images)
        return ResNet(config, data.shape, data.classes)

    def loss(self) -> tw.TokenLoss:
        import thinwire as tw
        from thinwire.train.batches import IGNORED

        return tw.ClassLoss(IGNORED)
