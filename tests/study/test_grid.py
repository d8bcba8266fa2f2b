"""How a study is read: combinations, names, what is shared, and what is refused."""

from pathlib import Path

import pytest

from thinwire.study.arguments import read_options
from thinwire.study.grid import Grid, read
from thinwire.train import check
from thinwire.train import config as configuration
from thinwire.train.config import ConfigError


def grid_of(tmp_path: Path, text: str, **options: object) -> Grid:
    file = tmp_path / "grid.toml"
    file.write_text(text)
    return read(file, **options)  # type: ignore[arg-type]


PLANS = """
[settings]
train.epochs = 2
"model.dim" = 64

[[plan]]
name = "fp32"
forward = "raw"
backward = "raw"

[[plan]]
forward = ["int4", "int2"]
backward = ["int8", "int4"]
"""


def test_lists_are_all_combinations(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, PLANS)
    names = ["fp32", "int4 / int8", "int4 / int4", "int2 / int8", "int2 / int4"]
    assert [plan.name for plan in grid.plans] == names
    assert grid.baseline == "fp32"
    assert grid.seeds == 3


def test_settings_of_all_runs_are_replaced_by_those_that_are_given(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, PLANS, instead=["train.epochs=5", "data.path=a=b"])
    assert grid.settings == {"train.epochs": 5, "model.dim": 64, "data.path": "a=b"}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train.epochs", "--set train.epochs: write a setting and its value, as data.path=images"),
        ("train.epoch=3", "unknown setting 'train.epoch'; did you mean 'train.epochs'?"),
        ("train.epochs=x", "--train.epochs: 'x' is not a whole number"),
    ],
)
def test_settings_that_are_none_are_one_line(text: str, line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        grid_of(tmp_path, PLANS, instead=[text])
    assert line in str(error.value)


def test_a_plan_may_have_seeds_of_its_own(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, PLANS + "seeds = 1\n")
    assert [len(grid.finals(plan, None)) for plan in grid.plans] == [3, 1, 1, 1, 1]
    grid = grid_of(tmp_path, PLANS + "seeds = 1\n", seeds=2)
    assert [len(grid.finals(plan, None)) for plan in grid.plans] == [2] * 5


def test_a_case_has_what_all_share_and_what_is_its_own(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, PLANS)
    case = grid.case(grid.plans[1], seed=2, lr=0.01)
    assert case.settings == {
        "link.transport": "memory",
        "link.rate": "none",
        "threads": 1,
        "train.epochs": 2,
        "model.dim": 64,
        "plan.forward": "int4",
        "plan.backward": "int8",
        "train.seed": 2,
        "train.lr": 0.01,
    }
    assert case.key == grid.case(grid.plans[1], seed=2, lr=0.01).key
    others = [grid.case(grid.plans[1], seed=1, lr=0.01), grid.case(grid.plans[2], seed=2, lr=0.01)]
    assert case.key not in {other.key for other in others}


def test_plans_and_seeds_may_be_given_beside_the_file(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, PLANS, added=["tile", "int3 / int6"], seeds=5)
    assert [plan.name for plan in grid.plans][-2:] == ["tile / tile", "int3 / int6"]
    assert grid.seeds == 5
    assert len(grid.finals(grid.plans[0], None)) == 5


def test_each_plan_is_tried_at_the_same_learning_rates(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, "learning_rates = [0.1, 0.01]\n" + PLANS)
    assert [[case.lr for case in grid.trials(plan)] for plan in grid.plans] == [[0.1, 0.01]] * 5
    assert {case.seed for case in grid.trials(grid.plans[0])} == {0}
    # the first of the runs that are reported is one of those
    assert grid.finals(grid.plans[0], 0.1)[0].key == grid.trials(grid.plans[0])[0].key


def test_a_plan_may_set_more_than_its_schemes(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, '[[plan]]\nforward = "int4"\nsettings = { train.epochs = [1, 2] }\n')
    assert [plan.name for plan in grid.plans] == [
        "int4 / int8, train.epochs=1",
        "int4 / int8, train.epochs=2",
    ]


WRONG = {
    "[[plan]]\nforwards = 'int4'": "unknown key 'forwards' in a plan; did you mean 'forward'",
    "titel = 'x'\n[[plan]]\nforward = 'int4'": "unknown key 'titel'; did you mean 'title'",
    "title = 'x'": "a study needs plans, each under [[plan]]",
    "plan = 3": "a study needs plans",
    "[[plan]]\nforward = []": "an empty list in a plan leaves nothing to run",
    "[[plan]]\nforward = 4": "plan.forward = 4 is not text",
    "[[plan]]\nforward = ['int4', 'int2']\nname = 'x'": "a plan with lists is several",
    "[[plan]]\nforward = 'int4'\n[[plan]]\nforward = 'int4'": "'int4 / int8' is there twice",
    "baseline = 'fp31'\n[[plan]]\nname = 'fp32'": "no plan is called 'fp31'; did you mean 'fp32'",
    "seeds = 0\n[[plan]]\nforward = 'int4'": "seeds = 0: a whole number from 1 to 100",
    "[settings]\ntrain.epoch = 1\n[[plan]]\nforward = 'int4'": "unknown setting 'train.epoch'",
    "learning_rates = ['x']\n[[plan]]\nforward = 'int4'": "numbers above 0",
    "[": "is no valid TOML",
    "rates = ['fast']\n[[plan]]\nforward = 'int4'": "rates: 'fast' is no link rate",
    "rates = ['none']\n[[plan]]\nforward = 'int4'": "rates: 'none' is none to predict times at",
    "deviations = 'x'\n[[plan]]\nforward = 'int4'": "is no list of texts",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_makes_no_sense_is_one_line(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        grid_of(tmp_path, text)
    assert WRONG[text] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read the study"):
        read(tmp_path / "none.toml")


@pytest.mark.parametrize("name", ["quantization", "topk", "feedback"])
def test_the_studies_that_come_along_can_be_run(name: str) -> None:
    grid = read_options([name, "--seeds", "1"]).grid
    assert grid.baseline == "fp32"
    assert len(grid.plans) > 8
    assert grid.deviations


def test_plugins_lie_beside_the_study_or_where_they_are_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    grid = grid_of(tmp_path, 'plugins = ["own.py"]\n' + PLANS, files=["typed.py"])
    case = grid.case(grid.plans[0], 0, None)
    assert case.settings["plugin"] == (str(tmp_path / "own.py"), str(tmp_path / "typed.py"))
    (tmp_path / "moved").mkdir()
    moved = grid_of(tmp_path / "moved", 'plugins = ["own.py"]\n' + PLANS)
    assert moved.case(moved.plans[0], 0, None).key == case.key  # wherever the files are


def test_a_plan_that_cannot_be_is_refused_before_anything_runs(tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_text('[[plan]]\nforward = "int4"\nbackward = "topk:0.1,mask=shared"\n')
    with pytest.raises(ConfigError, match="takes its mask from the forward link"):
        read_options([str(file)])
    file.write_text('[[plan]]\nforward = "int44"\n')
    with pytest.raises(ConfigError, match="the plan 'int44 / int8': in spec"):
        read_options([str(file)])


@pytest.mark.parametrize(
    ("name", "plans", "runs"),
    [
        ("images", 28, 46),
        ("quantization", 12, 36),
        ("topk", 11, 21),
        ("feedback", 17, 27),
        ("resnet18", 34, 102),
        ("gpt2", 23, 69),
    ],
)
def test_the_studies_that_come_with_it_can_be_read(
    name: str, plans: int, runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()  # not what is meant
    grid = read_options([name]).grid
    assert len(grid.plans) == plans
    assert sum(len(grid.finals(plan, None)) for plan in grid.plans) == runs
    assert grid.deviations
    assert bool(grid.not_run) == (name in ("resnet18", "gpt2"))
    for plan in grid.plans:
        config = configuration.build({**grid.case(plan, 0, None).settings, "data.path": "there"})
        assert check.resolved(config).pipeline.stages == 4


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("settings = 3\n", "settings = 3 is no table"),
        ("target = [1, 2]\n", "target: write one validation loss"),
        (f"learning_rates = [1{'0' * 400}]\n", "learning_rates: write finite numbers above 0"),
        ("learning_rates = [inf]\n", "learning_rates: write finite numbers above 0"),
        ("settings = { train.seed = 7 }\n", "train.seed can't be set; the study's seeds are 0, 1"),
        ("settings = { train.seed = 0 }\n", "train.seed can't be set"),
        ("settings = { compare = true }\n", "compare can't be set; compare plans by"),
        (
            "learning_rates = [0.1]\nsettings = { train.lr = 0.5 }\n",
            "train.lr beside learning_rates: leave one of them out",
        ),
    ],
)
def test_what_runs_would_not_have_is_refused(text: str, line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        grid_of(tmp_path, text + '[[plan]]\nforward = "raw"\n')
    assert line in str(error.value)


def test_another_plugin_of_the_same_name_makes_other_runs(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("a = 1")
    grid = grid_of(tmp_path, PLANS, files=[str(own)])
    before = grid.case(grid.plans[0], 0, None).key
    moved = tmp_path / "elsewhere.py"
    moved.write_text("a = 1")
    again = grid_of(tmp_path, PLANS, files=[str(moved)])
    assert again.case(again.plans[0], 0, None).key == before
    own.write_text("a = 2")
    assert grid.case(grid.plans[0], 0, None).key != before
