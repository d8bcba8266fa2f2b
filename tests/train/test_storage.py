"""How much a run remembers and where: what is said, what is asked for, what is refused."""

import pytest
import torch

import thinwire as tw
from thinwire.store.slots import slot_size
from thinwire.train import check, pace, storage
from thinwire.train.arguments import read_arguments
from thinwire.train.config import Config, ConfigError, parse_size
from thinwire.train.model import Gpt
from thinwire.train.storage import Need, need_of, sentence, slow_disk, storage_of

ROW = 2048 + 16 * 6  # bytes of 2,048 values in int8
SLOT = slot_size(ROW)


def config(*words: str) -> Config:
    small = ["--model.dim=32", "--model.context=64", "--forward=delta(int4)", "--train.batch=8"]
    return check.resolved(read_arguments([*small, *words]))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2gb", 2 * 10**9),
        ("1.5 MB", 1_500_000),
        ("1gib", 2**30),
        ("3 kib", 3072),
        ("7b", 7),
        ("0", 0),
    ],
)
def test_sizes_are_read_with_their_units(text, size):
    assert parse_size(text, "ref.budget") == size


@pytest.mark.parametrize("text", ["2", "gb", "2tb2", "-1gb", "1e400gb", "2gbit", "nan b"])
def test_anything_else_is_refused_by_the_name_of_its_setting(text):
    with pytest.raises(ConfigError, match=r"^--ref\.budget"):
        check.resolved(read_arguments([f"--ref.budget={text}", "--forward=delta(int4)"]))


@pytest.mark.parametrize(
    ("words", "ends"),
    [
        ((), [1, 1]),
        (("--backward=delta(int4)",), [2, 2]),
        (("--nproc=4",), [1, 2, 2, 1]),
        (("--link.transport=memory", "--pipeline.stages=4"), [6]),
        (("--forward=int4",), [0, 0]),
        (("--forward=off", "--backward=off"), [0, 0]),
        (("--nproc=2", "--pipeline.schedule=ZBV"), [2, 2]),
    ],
)
def test_a_rank_remembers_at_its_ends_of_links(words, ends):
    made = config(*words)
    for rank, count in enumerate(ends):
        need = need_of(made, Gpt(made), rank, 100)
        assert need.ends == count
        assert need.total == 100 * count * ROW
        assert need.step_bytes == 8 * count * ROW


def test_without_a_budget_all_is_in_ram(tmp_path):
    made = config()
    need = need_of(made, Gpt(made), 0, 100)
    kept = storage_of(made, need, tmp_path, 2)
    assert kept == tw.Storage()
    text = sentence(made, Gpt(made), need, kept, [], torch.device("cpu"))
    assert text is not None
    assert text.startswith(
        "references: 100 samples at one end of a link, 214 kB a rank. They are in RAM"
    )
    assert text.endswith("none goes to disk unless the run is stopped")


FOLDERS = {  # settings, samples: what is said of them
    "a budget": (
        "--ref.budget=100kb",
        "Up to 100 kB of them are in RAM, the others in {0} (7 GB free)",
    ),
    "checkpoints": (
        "--checkpoint.every=5",
        "They are in RAM, and what checkpoints need of them in {0} (7 GB free)",
    ),
    "checkpoints without a disk": (
        "--checkpoint.every=5 --ref.disk=0",
        "They are in RAM, each checkpoint has a copy",
    ),
    "both": (
        "--ref.budget=100kb --checkpoint.every=5",
        (
            "Up to 100 kB of them are in RAM, the others and what checkpoints need in {0} "
            "(7 GB free)"
        ),
    ),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_what_lies_where_and_how_much_is_written_a_day_is_told(case, tmp_path, monkeypatch):
    words, where = FOLDERS[case]
    made, folder = config(*words.split()), tmp_path / "references"
    need = need_of(made, Gpt(made), 0, 100)
    monkeypatch.setattr(storage, "_free", lambda _: 7 * 10**9)
    monkeypatch.setattr(storage, "available_memory", lambda: None)
    kept = storage_of(made, need, folder, 2)
    monkeypatch.setattr(pace, "least_step_s", lambda *_: 0.1)
    text = sentence(made, Gpt(made), need, kept, [], torch.device("cpu"))
    a_day = storage.bytes_text(storage.written_a_step(made, need, kept) * 864_000)
    assert text == (
        "references: 100 samples at one end of a link, 214 kB a rank. "
        + where.format(folder)
        + f". At most {a_day} a day are written, with steps of 100 ms or more"
    )


STEP = 8 * ROW
RESIDENT = (100_000 - 3 * STEP) / (100 * ROW)  # of the references, as three steps' are in RAM too


@pytest.mark.parametrize(
    ("words", "written"),
    [
        ("--ref.budget=100kb", (1 - RESIDENT) * STEP),
        ("--checkpoint.every=5", STEP),
        ("--checkpoint.every=50 --ref.disk=0", 100 * ROW / 50),
        ("--checkpoint.every=50", 100 * ROW / 50),  # each sample has come several times
        (
            "--ref.budget=100kb --checkpoint.every=50",
            (1 - RESIDENT) * STEP + RESIDENT * 100 * ROW / 50,
        ),
        # room for half of the samples: only those are written
        (
            f"--ref.budget=60kb --ref.disk={4 * 50 * SLOT}b",
            STEP / 2 * (1 - (60_000 - 3 * STEP) / (50 * ROW)),
        ),
    ],
)
def test_a_step_writes_what_does_not_stay_in_ram_and_what_a_checkpoint_lacks(
    words, written, tmp_path
):
    made = config(*words.split())
    need = need_of(made, Gpt(made), 0, 100)
    kept = storage_of(made, need, tmp_path, 2)
    assert storage.written_a_step(made, need, kept) == pytest.approx(written)


def test_a_disk_of_0_bounds_what_is_remembered_by_ram(tmp_path):
    made = config("--ref.budget=100kb", "--ref.disk=0")
    need = need_of(made, Gpt(made), 0, 100)
    kept = storage_of(made, need, tmp_path, 2)
    assert kept == tw.Storage(100_000)
    text = sentence(made, Gpt(made), need, kept, [], torch.device("cpu"))
    assert text is not None
    assert "there is room for 43 % of the samples" in text


def test_a_bound_of_the_disk_counts_wherever_the_references_lie(tmp_path):
    bounds = set()
    for budget in ("none", "100kb", "1gb"):
        made = config(f"--ref.budget={budget}", f"--ref.disk={4 * 50 * SLOT}b")
        kept = storage_of(made, need_of(made, Gpt(made), 0, 100), tmp_path, 2)
        bounds.add(kept.capacity)
    assert bounds == {50 * SLOT}
    made = config(f"--ref.disk={4 * 50 * SLOT}b")
    need = need_of(made, Gpt(made), 0, 100)
    text = sentence(
        made, Gpt(made), need, storage_of(made, need, tmp_path, 2), [], torch.device("cpu")
    )
    assert text is not None
    assert "there is room for 50 % of the samples. They are in RAM" in text


def test_without_a_disk_checkpoints_bound_nothing(tmp_path):
    made = config("--ref.disk=0", "--checkpoint.every=5")
    assert storage_of(made, need_of(made, Gpt(made), 0, 100), tmp_path, 2) == tw.Storage()


@pytest.mark.parametrize("budget", ["none", "1gb"])
def test_rows_that_lie_on_disk_are_found_though_all_would_fit_into_ram(budget, tmp_path):
    (tmp_path / "0-forward-0-sender-2304.rows").touch()
    made = config(f"--ref.budget={budget}")
    kept = storage_of(made, need_of(made, Gpt(made), 0, 100), tmp_path, 2)
    assert kept.folder == tmp_path


@pytest.mark.parametrize(
    ("words", "samples", "asks"),
    [
        ((), 10**9, "set --ref.budget, as 2gb"),
        (("--ref.budget=20kb",), 100, "--ref.budget 20kb is less than the references of 3 steps"),
        (("--ref.budget=100kb",), 10**11, "set --ref.disk to less, as 10gb"),
        (("--ref.budget=100kb", "--ref.disk=900tb"), 10**12, "set --ref.disk to less"),
    ],
)
def test_what_does_not_fit_asks_for_the_setting_that_would_help(tmp_path, words, samples, asks):
    made = config(*words)
    with pytest.raises(ConfigError, match=asks):
        storage_of(made, need_of(made, Gpt(made), 0, samples), tmp_path, 2)


def test_a_disk_that_does_not_keep_up_is_told_with_numbers():
    facts = {"stalled_s": 0.0, "read_bytes": 10**9, "written_bytes": 5 * 10**8}
    assert slow_disk([facts], 100.0) is None
    line = slow_disk([facts, facts | {"stalled_s": 20.0}], 100.0)
    assert line is not None
    assert "waited 20.0 s of 100.0 s for references (1.5 GB read and written)" in line


def summary(**kinds: int):
    """What a summary says of a link, values by kind, and of the disk."""
    return {
        "links": [
            {
                "direction": "forward",
                "values": sum(kinds.values()),
                "kinds": {kind: {"values": n} for kind, n in kinds.items()},
            }
        ],
        "checkpoints": {"count": 1, "bytes": 3_000_000},
        "references": [],
        "config": {
            "ref": {"disk": None},
            "plan": {"forward": "delta(int4)"},
            "data": {"augment": "none"},
        },
    }


def test_what_went_to_disk_is_told_at_the_end():
    found = summary()
    assert storage.disk_sentence(found) == "Written to disk: 3 MB in 1 checkpoint."
    found["references"] = [{"written_bytes": 10**9}, {"written_bytes": 5 * 10**8}]
    found["checkpoints"]["count"] = 2
    expected = "Written to disk: 3 MB in 2 checkpoints, 1.5 GB of references."
    assert storage.disk_sentence(found) == expected


def test_visits_for_which_there_was_no_room_are_told_at_the_end():
    assert storage.no_room(summary(first=50, change=50)) is None
    assert "at 100.0 % of visits" in str(storage.no_room(summary(value=100)))
    stateless = summary(value=100)
    stateless["config"]["plan"]["forward"] = "int4"
    assert storage.no_room(stateless) is None
    found = summary(first=50, change=25, value=25)
    line = storage.no_room(found)
    assert line is not None
    assert line.startswith("There was no room to remember the sample at 25.0 % of visits")
    assert "raise --ref.budget" in line
    found["config"]["ref"]["disk"] = "1gb"
    assert "raise --ref.disk" in str(storage.no_room(found))


def test_a_disk_without_room_for_a_sample_is_refused(tmp_path):
    made = config(f"--ref.disk={4 * SLOT - 1}b")
    with pytest.raises(ConfigError, match=r"--ref.disk \d+b has room for no sample: one takes"):
        storage_of(made, need_of(made, Gpt(made), 0, 100), tmp_path, 2)


def test_a_run_that_remembers_nothing_says_nothing():
    assert (
        sentence(
            config(), Gpt(config()), Need(10, 0, 0, 0, 0), tw.Storage(), [], torch.device("cpu")
        )
        is None
    )
