"""What a benchmark shows: a short header, and a table for each size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from thinwire.bench.run import size_text

_FIXED = "\N{NO-BREAK SPACE}"


def show(screen: Console, document: dict[str, Any]) -> None:
    """Print the document of ``run.document`` for a reader."""
    screen.print(heading(document["machine"]), soft_wrap=True, markup=False)
    for numel in dict.fromkeys(row["numel"] for row in document["rows"]):
        screen.print()
        screen.print(_table(numel, [row for row in document["rows"] if row["numel"] == numel]))
    screen.print(
        "x copy: a torch copy_ of the uncompressed tensor takes so many times as long. Peers: so "
        "many times as long as ours; who they are is in docs/bench.md.",
        soft_wrap=True,
    )


def heading(machine: dict[str, Any]) -> str:
    """The machine and the method, in a few lines."""
    kept = (
        "freed memory kept, so that no peer pays for page faults"
        if machine["heap_kept"]
        else "the C library can't be told to keep freed memory: peers pay for page faults"
    )
    text = (
        f"{machine['cpu']}, {machine['cores']} cores, kernels: {machine['level']}; "
        f"torch {machine['torch']}, thinwire {machine['thinwire']}, {machine['date']}\n"
        f"threads: {machine['threads']}; medians of {machine['clock']} over up to "
        f"{machine['rounds']} interleaved rounds; load {machine['load_average_at_start']:.1f} "
        f"at the start, {machine['load_average_at_end']:.1f} at the end\n"
        f"tensors: Gaussian, rows × {machine['row']}, topk: one row; caches emptied before each "
        f"operation; {kept}"
    )
    if machine["level"] == "eager":
        reason = machine["why_eager"] or "as asked for"
        text += f"\nnote: measured is the slower torch twin of the kernels ({reason})"
    return text


def _table(numel: int, rows: list[dict[str, Any]]) -> Table:
    table = Table(
        title=f"{size_text(numel)} values", title_justify="left", title_style="bold", box=box.SIMPLE
    )
    table.add_column("operation", no_wrap=True)
    table.add_column("codec", no_wrap=True)
    for name in ("bits", "ms", "GB/s", "x copy"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("peers, x ours")
    for row, beside in _with_peers(rows):
        table.add_row(
            _operation(row),
            f"{row['codec']}{'' if row['dtype'] == 'fp32' else ' of ' + row['dtype']}",
            f"{row['bits_per_value']:.2f}",
            f"{row['ms']:.2f}",
            f"{row['gb_per_s']:.2f}",
            f"{row['x_copy']:.2f}",
            ", ".join(
                f"{peer['peer']} {peer['x_peer']:.2f}".replace(" ", _FIXED) for peer in beside
            ),
        )
    return table


def _with_peers(
    rows: list[dict[str, Any]],
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each row of ours with the rows of its peers, which follow it."""
    ours = [index for index, row in enumerate(rows) if row["peer"] is None]
    for start, end in zip(ours, [*ours[1:], len(rows)], strict=True):
        yield rows[start], rows[start + 1 : end]


def _operation(row: dict[str, Any]) -> str:
    if row["reference"] is None:
        return str(row["op"])
    output = {None: "", True: ", in place", False: ", separate"}[row["in_place"]]
    return f"{row['op']}, m {row['reference']}{output}"
