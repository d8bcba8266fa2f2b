"""Plugins: what loading a file or an installed package does, and what it says of bad ones."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import thinwire as tw
from thinwire import plugins, spec
from thinwire.cli import main

pytestmark = pytest.mark.usefixtures("registry")

SIGN = """
import dataclasses
import torch
import thinwire as tw

@tw.register_codec("sign")
@dataclasses.dataclass(frozen=True)
class Sign(tw.TensorCodec):
    loudness: float = 1.0

    def encode(self, x):
        return {"negative": tw.Bits(x < 0, 1), "scale": x.abs().mean(1)}

    def decode(self, parts, n):
        y = torch.where(parts["negative"], -1.0, 1.0) * parts["scale"][:, None]
        return self.loudness * y
"""


def written(folder: Path, text: str, name: str = "own.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_registers_its_codecs(tmp_path: Path) -> None:
    assert plugins.load(written(tmp_path, SIGN)) == ["sign"]
    assert str(tw.codec("sign:loudness=2")) == "sign:loudness=2.0"


def test_a_file_is_run_once_however_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, SIGN)
    (tmp_path / "link.py").symlink_to(path)
    monkeypatch.chdir(tmp_path)
    for name in (path, Path("own.py"), Path("link.py"), tmp_path / ".." / tmp_path.name / "own.py"):
        assert plugins.load(name) == ["sign"]
    assert len([m for m in sys.modules.values() if getattr(m, "__file__", "") == str(path)]) == 1


def test_a_file_that_a_package_has_imported_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, SIGN, "imported_before.py")
    monkeypatch.syspath_prepend(tmp_path)
    before = importlib.import_module("imported_before")
    assert plugins.load(path) == ["sign"]
    assert spec.names_of(before.__name__) == ["sign"]


BAD = {
    "a syntax error": ("import torch\n\ndef encode(:\n", "{}:3: SyntaxError: invalid syntax"),
    "an error": ("import torch\nx = 1\ny = x / 0\n", "{}:3: ZeroDivisionError: division by zero"),
    "an error in a function": (
        "def f():\n    return g()\n\ndef g():\n    return h\n\nf()\n",
        "{}:5: NameError: name 'h' is not defined",
    ),
    "an error of a library": ("import json\n\njson.loads('{')\n", "{}:3: JSONDecodeError: Expect"),
    "a missing package": ("import nowhere_to_be\n", "{}:1: ModuleNotFoundError: No module named"),
    "an exit": ("import sys\nsys.exit('bye')\n", "{}:2: SystemExit: bye"),
    "a file that it misses": ("open('nowhere')\n", "{}:1: FileNotFoundError: [Errno 2] No such"),
    "text in lines": ("raise ValueError('a\\nb')\n", "{}:1: ValueError: a b"),
    "a name that is taken": (
        SIGN.replace('"sign"', '"int4"'),
        "{}:6: ValueError: the spec name 'int4' is taken by Integer of thinwire.codecs.integer",
    ),
    "an unusable class": (SIGN.replace("(frozen=True)", ""), "{}:6: ValueError: Sign must be a"),
    "nothing": ("x = 1\n", "{} registers nothing: put @tw.register_codec, @tw.register_scheme or"),
    "an empty file": ("", "{} registers nothing"),
    "no text": ("\0\n", "{}: SyntaxError: source code string cannot contain null bytes"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_one_line_that_names_the_place(what: str, tmp_path: Path) -> None:
    text, message = BAD[what]
    path = written(tmp_path, text)
    with pytest.raises(plugins.PluginError) as error:
        plugins.load(path)
    assert str(error.value).startswith(message.format(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.py", "can't read the plugin nowhere.py: No such file or directory"),
        (".", "can't read the plugin .: Is a directory"),
        ("own.py/x.py", "can't read the plugin own.py/x.py: Not a directory"),
        ("a\0b", "can't read the plugin a\0b: embedded null"),
        ("x" * 5000, "File name too long"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, SIGN)
    with pytest.raises(plugins.PluginError) as error:
        plugins.load(Path(name))
    assert message in str(error.value)


def test_a_file_that_was_corrected_can_be_loaded(tmp_path: Path) -> None:
    path = written(tmp_path, SIGN + "\nraise RuntimeError('not yet')\n")
    with pytest.raises(plugins.PluginError, match="not yet"):
        plugins.load(path)
    path.write_text(SIGN)
    assert plugins.load(path) == ["sign"]


def in_a_new_process(path: Path, then: str) -> str:
    """What is printed after the file was loaded where nothing else had been imported."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom thinwire import plugins\nfound = None\n"
        f"try:\n    found = plugins.load(Path({str(path)!r}))\nexcept plugins.PluginError:\n"
        f"    pass\n{then}"
    )
    words = [sys.executable, "-c", code]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout


def test_what_is_built_in_is_not_taken_for_a_plugins(tmp_path: Path) -> None:
    assert in_a_new_process(written(tmp_path, SIGN), "print(found)") == "['sign']\n"


def test_neither_the_loader_nor_a_file_that_cannot_be_parsed_needs_torch(tmp_path: Path) -> None:
    path = written(tmp_path, "import torch\ndef f(:\n")
    assert in_a_new_process(path, "print('torch' in sys.modules)") == "False\n"


def test_a_name_for_a_built_in_class_with_options_is_one_too(tmp_path: Path) -> None:
    text = (
        "import thinwire as tw\nfrom thinwire.codecs.integer import Integer\n"
        "tw.register_codec('tiny', bits=4, group=32)(Integer)\n"
    )
    assert plugins.load(written(tmp_path, text)) == ["tiny"]
    assert tw.codec("tiny") == tw.codec("int4:group=32")


def test_the_digest_tells_files_apart_wherever_they_are(tmp_path: Path) -> None:
    one = written(tmp_path, SIGN)
    (tmp_path / "there").mkdir()
    other = written(tmp_path / "there", SIGN, "moved.py")
    assert plugins.digest([str(one)]) == plugins.digest([str(other)])
    assert plugins.digest([str(one)]) != plugins.digest([])
    assert plugins.digest([str(one)]) != plugins.digest([str(one), str(other)])
    other.write_text(SIGN + "#")
    assert plugins.digest([str(one)]) != plugins.digest([str(other)])


# What is installed.


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages, of which one is good and two are broken."""
    info = tmp_path / "someones-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: someones\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{plugins.GROUP}]\ngood = someones_good\nbad = someones_bad\nquits = someones_quits\n"
    )
    written(tmp_path, SIGN, "someones_good.py")
    written(tmp_path, "import nowhere\n", "someones_bad.py")
    written(tmp_path, "raise SystemExit\n", "someones_quits.py")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("someones_good", "someones_bad"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


WARNINGS = [
    "plugin 'bad' (someones_bad) is not loaded: ModuleNotFoundError: No module named 'nowhere'",
    "plugin 'quits' (someones_quits) is not loaded: SystemExit:",
]


@pytest.mark.usefixtures("installed")
def test_what_packages_install_is_there_and_what_is_broken_is_a_line() -> None:
    assert plugins.load_installed() == WARNINGS
    assert "sign" in spec.names("codec")


def test_a_command_loads_what_is_installed_and_goes_on_without_what_is_broken(
    installed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(installed)
    assert main(["train", "--forward", "sign", "--backward", "int99"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors[:2] == [f"thinwire: warning: {line}" for line in WARNINGS]
    assert errors[2:] == [errors[-1]]
    assert errors[-1].startswith("thinwire: error: --backward: in spec 'int99'")


def test_a_file_may_be_given_that_is_installed_too(installed: Path) -> None:
    plugins.load_installed()
    assert plugins.load(installed / "someones_good.py") == ["sign"]


# What the commands say.


@pytest.mark.parametrize("command", ["train", "bench codecs"])
@pytest.mark.parametrize("what", ["a syntax error", "an error", "nothing"])
def test_a_bad_plugin_is_one_line_and_exit_code_2(
    what: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    text, message = BAD[what]
    path = written(tmp_path, text)
    assert main([*command.split(), "--plugin", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"thinwire: error: {message.format(path)}")
    assert captured.err.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir() if p.name != "__pycache__"] == ["own.py"]


def test_a_spec_of_a_plugin_is_read_after_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, SIGN)
    for words in (["train", "--forward"], ["bench", "codecs", "--codecs"]):
        assert main([*words, "sign:loud=3", "--plugin", str(path)]) == 2
        assert "sign has no option 'loud'; did you mean 'loudness'?" in capsys.readouterr().err


def test_a_source_alone_is_a_plugin(
    registry: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "half.py"
    file.write_text(
        "import torch, thinwire as tw\n"
        "@tw.register_source('half_of_all')\n"
        "class Half(tw.Source):\n"
        "    def ids(self, context, rows, positions):\n"
        "        return torch.zeros(rows, positions, dtype=torch.int64)\n"
    )
    assert plugins.load(file) == []
    assert tw.scheme("predicted(int4,by=half_of_all)").takes == frozenset()
    assert main(["check", str(file), "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["checked"]
    assert report["spec"] == "predicted(int8,by=half_of_all)"


@pytest.mark.parametrize("takes", ["'token'", "['token']", "(3,)"])
def test_what_a_source_takes_is_a_tuple_of_names(
    takes: str, registry: None, tmp_path: Path
) -> None:
    file = tmp_path / "pair.py"
    file.write_text(
        "import thinwire as tw\n"
        f"@tw.register_source('pair')\nclass Pair(tw.Source):\n    takes = {takes}\n"
        "    def ids(self, context, rows, positions):\n        return context['token']\n"
    )
    with pytest.raises(plugins.PluginError, match=r"takes of Pair is a tuple of names"):
        plugins.load(file)
