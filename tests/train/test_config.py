"""Settings: how files and options become a configuration, and how mistakes are answered."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest

from thinwire.train import check, config, size, spelling
from thinwire.train.arguments import read_arguments
from thinwire.train.config import Config, ConfigError


def test_no_arguments_give_the_documented_defaults() -> None:
    resolved = check.resolved(read_arguments([]))
    assert (resolved.nproc, resolved.num_stages, resolved.pipeline.microbatches) == (2, 2, 8)
    assert (resolved.plan.forward, resolved.plan.backward) == ("default", "int8")
    assert (resolved.link.rate, resolved.link.transport) == ("100mbit", "gloo")


def test_options_override_the_file_and_the_file_overrides_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('nproc = 4\n[train]\nlr = 1\nsteps = 7\n[plan]\nforward = "int8"\n')
    read = read_arguments([str(file), "--train.steps", "9"])
    assert (read.nproc, read.train.lr, read.train.steps) == (4, 1.0, 9)
    assert (read.plan.forward, read.plan.backward) == ("int8", "int8")


def test_short_options_name_the_same_settings() -> None:
    short = read_arguments(["--steps", "3", "--quick", "--forward", "bf16", "--backward=raw"])
    long = read_arguments(
        ["--train.steps=3", "--train.quick=true", "--plan.forward=bf16", "--plan.backward=raw"]
    )
    assert short == long


def test_skipping_frozen_stages_is_on_and_can_be_switched_off() -> None:
    assert read_arguments([]).pipeline.skip_frozen
    assert not read_arguments(["--skip-frozen", "false"]).pipeline.skip_frozen
    assert not read_arguments(["--pipeline.skip_frozen=false"]).pipeline.skip_frozen


def test_a_model_of_which_nothing_would_be_trained_is_refused() -> None:
    assert check.resolved(read_arguments(["--train.frozen", "4"])).train.frozen == 4
    with pytest.raises(ConfigError, match=r"train\.frozen is 5 but model\.layers 4: nothing would"):
        check.resolved(read_arguments(["--train.frozen", "5"]))


RESNET = ["--model.kind=resnet8", "--data.path=images"]


def test_defaults_are_those_of_the_model_and_the_optimizer() -> None:
    def trained(*words: str) -> tuple[object, ...]:
        train = check.resolved(read_arguments(words)).train
        return train.optimizer, train.lr, train.weight_decay, train.batch, train.clip

    assert trained() == ("adamw", 1e-3, 0.1, 16, 1.0)
    assert trained("--train.optimizer=sgd") == ("sgd", 0.1, 5e-4, 16, 1.0)
    assert trained(*RESNET) == trained(*RESNET, "--train.optimizer=default")
    assert trained(*RESNET) == ("sgd", 0.1, 5e-4, 128, 0.0)
    assert trained(*RESNET, "--train.optimizer=adamw") == ("adamw", 1e-3, 0.1, 128, 0.0)
    assert trained(*RESNET, "--train.lr=0.5", "--train.clip=2")[1:] == (0.5, 5e-4, 128, 2.0)


def test_a_file_of_an_earlier_version_gives_the_run_that_it_gave(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    lines = spelling.to_toml(check.resolved(Config())).splitlines()
    file.write_text("\n".join(line for line in lines if "optimizer" not in line))
    assert check.resolved(read_arguments([str(file)])) == check.resolved(Config())


@pytest.mark.parametrize("words", [[], RESNET])
def test_what_the_model_has_not_is_not_written(words: list[str], tmp_path: Path) -> None:
    made = check.resolved(read_arguments(words))
    written = tomllib.loads(text := spelling.to_toml(made))
    assert ("layers" in written["model"]) == ("augment" not in written["data"]) == (not words)
    (tmp_path / "config.toml").write_text(text)
    assert read_arguments([str(tmp_path / "config.toml")]) == made


def test_a_config_file_may_follow_a_flag(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\nsteps = 7\n")
    read = read_arguments(["--quick", str(file)])
    assert read.train.quick
    assert read.train.steps == 7


def test_a_flag_can_be_switched_off_again(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("compare = true\n")
    assert not read_arguments([str(file), "--compare", "false"]).compare


def test_none_unsets_an_optional_setting(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\nsteps = 7\n")
    assert read_arguments([str(file), "--steps", "none"]).train.steps is None


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    given = check.resolved(
        dataclasses.replace(
            Config(),
            data=config.DataConfig(path='odd "name" \\ \x7f \u00e9 \U0001f600\n', validation=1e-05),
            train=config.TrainConfig(quick=True, steps=None),
        )
    )
    file = tmp_path / "config.toml"
    file.write_text(spelling.to_toml(given), encoding="utf-8")
    assert read_arguments([str(file)]) == given


def test_the_written_file_leaves_out_the_run_folder() -> None:
    written = tomllib.loads(spelling.to_toml(dataclasses.replace(Config(), out="runs/one")))
    assert "out" not in written


def test_every_setting_has_a_help_line() -> None:
    assert all(entry.help for entry in config.settings())


BAD_OPTIONS = [
    (["--modle.dim", "3"], "unknown section 'modle' in --modle.dim; did you mean 'model'?"),
    (["--model.dimm", "3"], "unknown field 'dimm' in --model.dimm; did you mean 'dim'?"),
    (["--dim", "3"], "unknown option --dim; did you mean '--model.dim'?"),
    (["--stepps", "3"], "unknown option --stepps; did you mean 'steps'?"),
    (["--model.dim", "x"], "--model.dim: 'x' is not a whole number"),
    (["--model.dim", "none"], "--model.dim: 'none' is not a whole number"),
    (["--steps", "x"], "--train.steps: 'x' is not a whole number or none"),
    (["--train.lr", "fast"], "--train.lr: 'fast' is not a number"),
    (["--compare=maybe"], "--compare: 'maybe' is not true or false"),
    (["--quick", "maybe"], "--train.quick: 'maybe' is not true or false"),
    (["--json", "yes"], "--json: 'yes' is not true or false"),
    (["--steps", "9" * 5000], "is not a whole number or none"),
    (["--modle\nx", "3"], "unknown option --modle\\nx"),
    (["--link.transport", "glo\no"], "unknown value 'glo\\no'"),
    (
        ["--pipeline.schedule", "interleaved1f1"],
        "unknown value 'interleaved1f1'; did you mean 'Interleaved1F1B'?",
    ),
    (["a.toml", "b.toml"], "unexpected argument 'b.toml'"),
    (["--train.lr"], "expected one argument"),
    (["missing.toml"], "can't read the config file missing.toml: No such file"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_OPTIONS)
def test_a_bad_option_is_one_line_that_names_it(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_arguments(arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


BAD_FILES = [
    ("[modell]\ndim = 1\n", "unknown section [modell]; did you mean 'model'?"),
    ("[model]\ndims = 1\n", "unknown setting 'model.dims'; did you mean 'model.dim'?"),
    ("npro = 1\n", "unknown setting 'npro'; did you mean 'nproc'?"),
    ('[model]\ndim = "wide"\n', "model.dim = 'wide' is not a whole number"),
    ("[model]\ndim = true\n", "model.dim = true is not a whole number"),
    ('[link]\ntransport = "glo"\n', "unknown value 'glo'; did you mean 'gloo'?"),
    ("model = 3\n", "unknown setting 'model'"),
    ("[model\n", "is no valid TOML"),
    ('[link]\ntransport = "g\\nlo"\n', "unknown value 'g\\nlo'"),
    ('"a\\nb" = 1\n', "unknown setting 'a\\nb'"),
    ('["a\\u001bb"]\nx = 1\n', "unknown section [a\\x1bb]"),
    (f"nproc = {'9' * 5000}\n", "is no valid TOML"),
    (f"nproc = {'[' * 5000}\n", "is no valid TOML"),
]


@pytest.mark.parametrize(("text", "message"), BAD_FILES)
def test_a_bad_file_is_one_line_that_names_it(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_arguments([str(file)])
    assert message in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        read_arguments([str(file)])


BAD_COMBINATIONS = [
    (["--nproc", "8"], "8 stages but model.layers is 4"),
    (["--nproc", "0"], "nproc is 0; it must be at least 1"),
    (["--link.rate", "fast"], "link.rate: 'fast'"),
    (["--link.rate=-3mbit"], "link.rate: '-3mbit'"),
    (["--link.rate", "-5mbit"], "link.rate: '-5mbit' is no link rate; write 100mbit"),
    (["--link.rate", "30"], "link.rate: '30' is 30 bit/s, which is below 1 kbit/s; write 30mbit"),
    (["--link.latency", "61s"], "link.latency: '61s' is a latency above 60 s"),
    (["--data.path", ""], "--data.path is empty; name a text file or a folder"),
    (["--data.path", "a\0b"], "--data.path: no path has a NUL character"),
    (["--out", "a\0b"], "--out: no path has a NUL character"),
    (["--out", ""], "--out is empty"),
    (["--data.path", "a\udcff"], "--data.path: a\\udcff is not UTF-8"),
    (["--pipeline.deadline", "0"], "pipeline.deadline is 0.0; it must be above 0"),
    (["--pipeline.deadline", "1e9"], "pipeline.deadline is 1000000000.0; it must be at most 86400"),
    (["--train.seed", str(2**63)], f"it must be at most {2**63 - 1}"),
    (["--train.seed", "-1"], "train.seed is -1; it must be at least 0"),
    (["--train.seed", "9" * 4000], "train.seed is a number of 4000 digits; it must be at most"),
    (["--threads", "0"], "threads is 0; it must be at least 1"),
    (["--threads", "2000"], "threads is 2000; it must be at most 1024"),
    (["--model.dim", "4000000"], "model.dim 4000000, model.context 128 and train.batch 16 need"),
    (["--model.layers", "1000000000"], "but this machine has"),
    (["--model.context", "100000000000"], "but this machine has"),
    (["--train.batch", "10000000000"], "but this machine has"),
    (["--link.latency", "soon"], "link.latency: 'soon'"),
    (["--model.dim", "130"], "model.dim 130 is no multiple of model.heads 4"),
    (["--train.batch", "4"], "train.batch 4 can't be cut into 8 micro-batches"),
    (["--nproc", "4", "--pipeline.microbatches", "2"], "2 micro-batches for 4 stages"),
    (["--pipeline.microbatches", "7"], "can't run 7 micro-batches in equal rounds"),
    (["--pipeline.schedule", "1F1B", "--pipeline.stages", "4"], "1F1B runs one stage a process"),
    (["--pipeline.schedule", "ZBV", "--pipeline.stages", "2"], "ZBV needs two stages a process"),
    (["--pipeline.stages", "3"], "pipeline.stages 3 on 2 processes"),
    (["--link.transport", "memory", "--nproc", "2"], "keeps all stages in one process"),
    (["--device", "cdua"], "unknown device 'cdua'; did you mean 'cuda'?"),
    (["--train.lr", "0"], "train.lr is 0.0; it must be above 0"),
    (["--train.lr", "nan"], "train.lr is nan; write a finite number"),
    (["--data.validation", "1.5"], "data.validation is 1.5; it must be from 0 to below 1"),
    (["--data.validation", "0"], "data.validation is 0; keep some text for"),
    (["--model.kind", "resnet8"], "resnet8 trains on images; name their folder with --data.path"),
    ([*RESNET, "--data.path", ""], "--data.path is empty; name a folder of images"),
    ([*RESNET, "--data.validation", "0"], "data.validation is 0; keep some images for"),
    ([*RESNET, "--model.tied"], "--model.tied true is a setting of gpt, but"),
    (
        [*RESNET, "--model.layers", "8"],
        "--model.layers 8 is a setting of gpt, but model.kind is re",
    ),
    (
        ["--pipeline.cuts", "layer1"],
        "--pipeline.cuts layer1 is a setting of resnet8, resnet10, resnet20 and resnet18, but mod",
    ),
    (["--data.augment", "crop-flip"], "--data.augment crop-flip is a setting of resnet8, resnet10"),
    ([*RESNET, "--data.variants", "4"], "data.variants is 4, but data.augment is none; set --data"),
    ([*RESNET, "--data.variants", "-1"], "data.variants is -1; it must be at least 0"),
    ([*RESNET, "--data.size", "0"], "data.size is 0; it must be at least 1"),
    ([*RESNET, "--train.frozen", "4"], "train.frozen is 4 but resnet8 has 3 blocks: nothing would"),
    (
        [*RESNET, "--train.batch", "15"],
        "train.batch 15 in 8 micro-batches leaves one image to some, but BatchNorm needs two",
    ),
    ([*RESNET, "--train.batch", "7"], "train.batch 7 can't be cut into 8 micro-batches"),
    (["--train.optimizer", "adamw2"], "unknown value 'adamw2'; did you mean 'adamw'?"),
    (["--model.kind", "resnet9"], "unknown value 'resnet9'; did you mean 'resnet8'?"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_COMBINATIONS)
def test_settings_that_do_not_fit_are_refused_before_the_start(
    arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check.resolved(read_arguments(arguments))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "nproc", "stages"),
    [
        (["--pipeline.schedule", "ZBV"], 2, 4),
        (["--pipeline.stages_per_rank", "2"], 2, 4),
        (["--pipeline.stages", "4"], 2, 4),
        (["--link.transport", "memory"], 1, 2),
        (["--link.transport", "memory", "--pipeline.stages", "4"], 1, 4),
        (["--nproc", "4"], 4, 4),
    ],
)
def test_processes_and_stages_follow_from_each_other(
    arguments: list[str], nproc: int, stages: int
) -> None:
    resolved = check.resolved(read_arguments(arguments))
    assert (resolved.nproc, resolved.num_stages) == (nproc, stages)


@pytest.mark.parametrize("option", ["--forward", "--backward"])
def test_a_bad_codec_is_a_line_with_the_option_and_the_nearest_match(option: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{option}: .*did you mean 'int4'"):
        check.check_plan(read_arguments([option, "delta(intt4)"]))


def test_rates_and_latencies_are_read_in_their_usual_spellings() -> None:
    def link(rate: str, latency: str = "5ms") -> config.LinkConfig:
        return config.LinkConfig(rate=rate, latency=latency)

    assert config.link_rate(link("100mbit")) == 100e6
    assert config.link_rate(link("30m")) == 30e6
    assert config.link_rate(link("1gbit")) == 1e9
    assert config.link_rate(link("300 Mbit/s")) == 300e6
    assert config.link_rate(link("none")) is None
    assert config.link_latency(link("1gbit", "0.03s")) == 0.03
    assert config.link_latency(link("1gbit", "none")) == 0.0


def test_a_bare_link_has_no_emulated_latency() -> None:
    assert config.link_latency(config.LinkConfig(rate="none", latency="5ms")) == 0.0


def test_a_run_folder_with_content_is_refused(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match="not empty"):
        check.check_out(dataclasses.replace(Config(), out=str(tmp_path)))
    with pytest.raises(ConfigError, match="is a file"):
        check.check_out(dataclasses.replace(Config(), out=str(tmp_path / "summary.json")))
    check.check_out(dataclasses.replace(Config(), out=str(tmp_path / "new")))


def test_a_run_folder_that_no_system_can_make_is_refused_in_a_line_of_bearable_length() -> None:
    with pytest.raises(ConfigError, match="too long") as caught:
        check.check_out(dataclasses.replace(Config(), out="x" * 5000))
    assert len(str(caught.value)) < 700


def test_the_default_model_fits_a_small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size, "physical_memory", lambda: 10**9)
    assert check.resolved(Config()).nproc == 2


def test_a_plan_that_needs_what_the_data_do_not_have_is_refused() -> None:
    words = ["--model.kind=resnet8", "--data.path=x", "--backward=predicted(int4,by=target+token)"]
    with pytest.raises(
        ConfigError,
        match=r"--backward: .* needs token, which runs on images do not have; they have target",
    ):
        check.check_plan(read_arguments(words))
    words[-1] = "--backward=predicted(int4,by=target+position)"
    check.check_plan(read_arguments(words))
