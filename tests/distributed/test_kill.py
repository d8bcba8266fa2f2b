"""A process that is killed at any point of a checkpoint leaves a run that can be resumed."""

from __future__ import annotations

import datetime
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed import runs
from tests.distributed.pool import Pool
from tests.distributed.runs import TINY, Ending, run, text_in
from thinwire.pipeline import state
from thinwire.train import checkpoint, weights

_KILLED = 9
_SECONDS = 20  # that a run may take


class Countdown:
    """Ends the process at the k-th change that it makes to the disk, a file half way written.

    Counted are the changes of one checkpoint.
    """

    def __init__(self, k: int) -> None:
        self.left = k
        self.counts = False

    def watch(self, step: int) -> None:
        """Count in the checkpoint of ``step``."""
        for name in ("fsync", "replace", "rename", "mkdir", "unlink", "rmdir"):
            setattr(os, name, self.counted(getattr(os, name)))
        for module in (state, checkpoint, weights):
            module.save_file = self.counted(module.save_file, half=True)  # type: ignore[attr-defined]
        Path.write_text = self.counted(Path.write_text, half=True)  # type: ignore[method-assign]
        save = checkpoint.Checkpoints.save

        def saved(self_: checkpoint.Checkpoints, now: int, references: bool) -> None:
            self.counts = now == step
            save(self_, now, references)
            self.counts = False

        checkpoint.Checkpoints.save = saved  # type: ignore[assignment,method-assign]

    def counted(self, function: Callable[..., Any], half: bool = False) -> Callable[..., Any]:
        def ended(*args: Any, **kwargs: Any) -> Any:
            self.left -= self.counts
            if self.left == 0:
                if half:
                    function(*args, **kwargs)
                    path = next(a for a in args if isinstance(a, Path))
                    os.truncate(path, path.stat().st_size // 2)
                os._exit(_KILLED)
            return function(*args, **kwargs)

        return ended


def forked(
    rank: int, folder: Path, rendezvous: Path, options: list[str], killed: tuple[int, int] | None
) -> int:
    """Be a rank of two that does, or resumes, the run in ``folder``, in a fork; its process id.

    ``killed``: end rank 0 at this change of the disk in the checkpoint of this step.
    """
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        dist.init_process_group(
            "gloo",
            init_method=rendezvous.as_uri(),
            rank=rank,
            world_size=2,
            timeout=datetime.timedelta(seconds=_SECONDS),
        )
        if killed is not None and rank == 0:
            Countdown(killed[0]).watch(killed[1])
        outcome = run(rank, 2, options, str(folder), resumed=not options)
        code = 0 if outcome.how == "complete" else 3
    finally:
        os._exit(code)


def both(
    folder: Path, options: list[str] | None = None, killed: tuple[int, int] | None = None
) -> list[int]:
    """The exit codes of two ranks that do, or resume, the run in ``folder``."""
    rendezvous = folder.with_name(f"{folder.name}.rendezvous")
    rendezvous.unlink(missing_ok=True)
    pids = [forked(rank, folder, rendezvous, options or [], killed) for rank in range(2)]
    codes: dict[int, int] = {}
    deadline = time.monotonic() + _SECONDS
    while len(codes) < 2 and time.monotonic() < deadline:
        for pid in pids:
            ended, status = (0, 0) if pid in codes else os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    for pid in set(pids) - set(codes):
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    return [codes.get(pid, -9) for pid in pids]


def at_every_point(rank: int, world_size: int, begun: str | None, whole: str, options: Any) -> int:
    """End rank 0 at each change of the disk in a checkpoint, and resume; returns their number.

    ``begun``: a run of two steps that is resumed, and ended in its third checkpoint; None: in a new
    run's first. What was ended is resumed and ended at the next change, until that checkpoint is
    complete; then the rest of the run is compared with ``whole``, and another one begun.
    """
    dist.destroy_process_group()  # forks have one of their own
    step = 1 if begun is None else 3
    folder, k = Path(whole).with_name("killed"), 1
    while True:
        fresh = not folder.exists()
        if fresh and begun is not None:
            shutil.copytree(begun, folder)
        codes = both(folder, options if fresh and begun is None else None, (k, step))
        if codes == [0, 0]:
            runs.assert_equal_runs(Path(whole), folder)
            shutil.rmtree(folder)
            if fresh:
                return k - 1
        else:
            assert codes[0] == _KILLED, f"change {k}: {codes}"
            assert codes[1] not in (0, -9), f"change {k}: the other rank ended with {codes[1]}"
            k += 1


@pytest.mark.parametrize("which", ["first", "third"])
def test_a_rank_that_is_killed_at_any_point_of_a_checkpoint_leaves_a_run_to_resume(
    which: str, pool: Pool, tmp_path: Path
) -> None:
    options = [*TINY, "--data.path", text_in(tmp_path), "--checkpoint.every=1", "--steps=3"]
    whole, begun = str(tmp_path / "whole"), None
    pool.run(run, options, whole, world_size=2)
    if which == "third":  # it deletes the first
        begun = str(tmp_path / "begun")
        pool.run(run, options, begun, ending=Ending(crash_after=2), world_size=2)
    changes = pool.run(at_every_point, begun, whole, options, world_size=1, timeout=80)[0]
    assert changes >= 16  # each file, its folder and the names
