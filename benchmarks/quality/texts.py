"""The second text of the experiment, taken out of a package that holds it.

    apt-get download r-cran-janeaustenr
    dpkg -x r-cran-janeaustenr_*.deb unpacked
    pip install rdata
    python -m benchmarks.quality.texts --package unpacked --out texts/persuasion

Jane Austen's *Persuasion* (public domain), a file a chapter, so that whole chapters are kept for
validation. With 466,854 bytes it is within 0.2 % as long as the text that `thinwire train` takes
by default. The package stores its novels as an R lazy-load database, which `rdata` reads.
"""

from __future__ import annotations

import argparse
import re
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOVEL = "persuasion"
_HEADING = re.compile(r"chapter [0-9ivxl]+", re.IGNORECASE)
_LENGTH_BYTES = 4  # before each zlib stream of a lazy-load database: its length when inflated


def main() -> None:
    """Write the chapters into a new folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--package", type=Path, required=True, help="where it was unpacked")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    options = parser.parse_args()
    chapters = list(chapters_of(novel(options.package, NOVEL)))
    options.out.mkdir(parents=True)
    for number, text in enumerate(chapters):
        (options.out / f"chapter-{number:02}.txt").write_text(text, encoding="utf-8")
    size = sum(len(text.encode()) for text in chapters)
    print(f"{options.out}: {len(chapters)} files, {size:,} bytes")


def novel(package: Path, name: str) -> list[str]:
    """The lines of a novel; raises FileNotFoundError where ``package`` holds no such database."""
    index_file = next(package.rglob("janeaustenr/data/Rdata.rdx"), None)
    if index_file is None:
        raise FileNotFoundError(f"{package} holds no janeaustenr/data/Rdata.rdx")
    start, length = _converted(index_file.read_bytes())["variables"][name]
    stored = index_file.with_suffix(".rdb").read_bytes()[start : start + length]
    return [str(line) for line in _converted(zlib.decompress(stored[_LENGTH_BYTES:]))]


def _converted(content: bytes) -> Any:
    import rdata

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that bytes have no file name to tell their format by
        return rdata.conversion.convert(rdata.parser.parse_data(content))


def chapters_of(lines: list[str]) -> Iterator[str]:
    """What stands before the first heading, if anything does, then one text a chapter."""
    part: list[str] = []
    for line in lines:
        if _HEADING.fullmatch(line.strip()) and part:
            yield "\n".join(part) + "\n"
            part = []
        part.append(line)
    yield "\n".join(part) + "\n"


if __name__ == "__main__":
    main()
