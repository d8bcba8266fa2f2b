"""Which format the images in a folder have, and reading them."""

from __future__ import annotations

from pathlib import Path

from thinwire.train.config import ConfigError
from thinwire.train.vision import cifar, folder, idx
from thinwire.train.vision.parts import Found, unreadable


def load(path: str, size: int | None) -> Found:
    """The images in the folder ``path``; ``size`` is for those in a folder for each class.

    Raises ConfigError of one line where they can't be read.
    """
    root = Path(path)
    if root.is_file():
        raise ConfigError(
            f"--data.path: {path} is a file; unpack it and name the folder in which the images are"
        )
    try:
        files = idx.find(root)
        if not files and not cifar.find(root):
            return _by_class(root, size)
        if size is not None:
            raise ConfigError(
                f"--data.size {size} is for folders of PNG and JPEG; the images in {path} are all "
                "of one size"
            )
        return idx.load(root, files) if files else cifar.load(root)
    except OSError as error:
        raise unreadable(root, error) from None


def _by_class(root: Path, size: int | None) -> Found:
    if cifar.is_pickled(root):
        raise ConfigError(
            f"--data.path: {root} has the Python version of CIFAR, which is pickled and could run "
            "any program; take the binary version, with data_batch_1.bin or train.bin"
        )
    if not folder.find(root):
        raise ConfigError(
            f"--data.path: no images in {root}: it has neither IDX files, as "
            "train-images-idx3-ubyte.gz, nor CIFAR's, as data_batch_1.bin, nor a folder for each "
            "class"
        )
    return folder.load(root, size)
