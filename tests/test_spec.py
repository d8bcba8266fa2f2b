"""The grammar: strings to frozen dataclasses and back."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import thinwire.schemes  # noqa: F401 - registers delta
from thinwire.codecs import Codec, codec, register_codec
from thinwire.codecs.cast import Cast, Float8
from thinwire.codecs.integer import Integer
from thinwire.codecs.raw import Raw
from thinwire.errors import SpecError
from thinwire.schemes import Delta, Scheme, register_scheme
from thinwire.spec import Named, names, parse, register, simplest


@st.composite
def integers(draw) -> Integer:
    bits = draw(st.integers(1, 8))
    rounding = draw(st.sampled_from(["nearest", "stochastic"]))
    coarse = bits <= 2 and rounding == "stochastic"
    group = draw(st.integers(8, 64) if coarse else st.integers(8, 1 << 20) | st.just("row"))
    scale: Any = "range" if rounding == "stochastic" else draw(st.sampled_from(["range", "std"]))
    symmetric = draw(st.booleans()) and not (bits == 1 and scale == "range")
    if draw(st.booleans()):
        return Integer(bits, round=rounding)
    rotated, packed = draw(st.booleans()), draw(st.booleans())
    return Integer(bits, group, symmetric, rounding, scale, rotated, packed)


codecs = st.one_of(integers(), st.sampled_from([Raw(), Cast("bf16"), Cast("fp16"), Float8()]))
anything = codecs | st.builds(Delta, codecs, codecs) | st.builds(Delta, codecs)


@settings(max_examples=150, deadline=None)
@given(anything)
def test_the_canonical_string_parses_to_an_equal_value(value):
    assert parse(str(value)) == value
    assert hash(parse(str(value))) == hash(value)


@settings(max_examples=100, deadline=None)
@given(anything, st.data())
def test_spaces_do_not_matter(value, data):
    text = str(value)
    at = data.draw(st.sampled_from([i for i, c in enumerate(text) if c in ":,()="] or [0]))
    assert parse(f" {text[:at]} {text[at:]} ") == value


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="int48delrawfsgoup(),:=. ", max_size=30))
def test_any_text_is_a_spec_or_a_spec_error(text):
    try:
        value = parse(text)
    except SpecError:
        return
    assert parse(str(value)) == value


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("int4", "int4"),
        ("int4:group=128", "int4"),
        ("int4:round=stochastic,group=64", "int4:group=64,round=stochastic"),
        ("int2:round=stochastic,group=64", "int2:round=stochastic"),
        ("int2:scale=std", "int2"),
        ("int4:scale=range,round=nearest,symmetric=false", "int4"),
        ("int4:symmetric=true", "int4:symmetric"),
        ("int4:hadamard=on", "int4:hadamard"),
        ("int4:hadamard=off,zstd=false", "int4"),
        ("int4:zstd,hadamard=true,symmetric=on", "int4:symmetric,hadamard,zstd"),
        ("int4:group=row", "int4:group=row"),
        ("delta(int4)", "delta(int4)"),
        ("delta(int4,first=int8)", "delta(int4)"),
        ("delta(first=int4,change=int2)", "delta(int2,first=int4)"),
        ("delta(int2,int4)", None),
        ("delta(int2,first=int4)", "delta(int2,first=int4)"),
        ("delta(int4:group=64,first=int8:group=row)", "delta(int4:group=64,first=int8:group=row)"),
    ],
)
def test_canonical_strings_leave_out_defaults_and_order_options(text, canonical):
    if canonical is None:
        with pytest.raises(SpecError):
            parse(text)
    else:
        assert str(parse(text)) == canonical


def test_values_are_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        codec("int4").bits = 3  # type: ignore[attr-defined]


def test_an_option_belongs_to_the_innermost_spec_that_knows_it():
    value = parse("delta(int4:group=64,symmetric,first=int8:round=stochastic,group=32)")
    assert value.change == Integer(4, group=64, symmetric=True)
    assert value.first == Integer(8, group=32, round="stochastic")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("itn4", ["unknown", "'itn4'", "did you mean 'int4'?"]),
        ("INT4", ["did you mean 'int4'?"]),
        ("dleta(int4)", ["did you mean 'delta'?"]),
        ("delta(in4)", ["'in4'", "did you mean 'int"]),
        ("zzzzzz", ["known:", "int4", "raw"]),
        ("int9", ["unknown", "'int"]),
        ("int4:grp=64", ["int4 has no option 'grp'", "did you mean 'group'?"]),
        ("int4:bits=3", ["no option 'bits'", "known:"]),
        ("delta(int4,frist=int8)", ["delta has no argument 'frist'", "did you mean 'first'?"]),
        ("delta(int4:group=64,frist=int8)", ["'frist'", "did you mean 'first'?"]),
        ("int4:group=64,group=32", ["group is given twice"]),
        ("int4:group", ["group needs a value"]),
        ("int4:group=many", ["group=many is not a whole number or row"]),
        ("int4:group=0", ["group=0", "8 …"]),
        ("int4:group=-1", ["group=-1"]),
        ("int4:group=7", ["group=7"]),
        ("int4:round=up", ["round=up is not nearest or stochastic"]),
        ("int4:symmetric=1", ["symmetric=1 is not true or false"]),
        ("int2:scale=std,round=stochastic", ["needs scale=range"]),
        ("int2:round=stochastic,group=128", ["needs group=64 or less, not 128"]),
        ("int2:round=stochastic,group=row", ["needs group=64 or less, not row"]),
        ("int1:symmetric,scale=range", ["single level"]),
        ("raw:group=64", ["raw has no option 'group'"]),
        ("", ["expected a codec or scheme name, found the end"]),
        ("int4:", ["expected an option of int4, found the end"]),
        ("int4)", ["unexpected ')'"]),
        ("int4,int8", ["unexpected ',int8'"]),
        ("int4(int8)", ["options follow a colon"]),
        ("delta:int4", ["in parentheses"]),
        ("delta(int4", ["expected ',' or ')'", "found the end"]),
        ("delta", ["delta needs change, as in delta(int4)"]),
        ("delta(first=int8)", ["delta needs change"]),
        ("delta()", ["expected an argument of delta, found ')'"]),
        ("delta(int4,int8)", ["one inner spec"]),
        ("delta(delta(int4))", ["delta takes a codec"]),
        ("int4" * 100, ["400 characters"]),
    ],
)
def test_an_error_says_what_was_found_and_what_was_expected(text, parts):
    with pytest.raises(SpecError) as error:
        parse(text)
    for part in parts:
        assert part in str(error.value)


def test_a_spec_error_is_a_value_error():
    assert issubclass(SpecError, ValueError)


def test_a_value_that_is_not_text_is_a_spec_error():
    with pytest.raises(SpecError, match="not int"):
        parse(4)  # type: ignore[arg-type]


def test_a_scheme_is_no_codec():
    with pytest.raises(SpecError, match="is a scheme"):
        codec("delta(int4)")


def test_a_user_is_told_of_a_bad_option_in_python_too():
    with pytest.raises(SpecError, match="1 to 8 bits"):
        Integer(9)


# registration


INT8 = Integer(8)


@dataclasses.dataclass(frozen=True)
class Wrap(Named):
    inner: Codec
    other: Codec = INT8
    decay: float = 0.5
    warm: bool = False
    cold: bool = True


@pytest.mark.usefixtures("registry")
@settings(max_examples=60, deadline=None)
@given(st.builds(Wrap, codecs, codecs, st.floats(-1e9, 1e9), st.booleans(), st.booleans()))
def test_schemes_with_plain_options_come_back(value):
    register("scheme", "wrap")(Wrap)
    assert parse(str(value)) == value


@pytest.mark.usefixtures("registry")
def test_flags_and_numbers_of_a_scheme_stand_beside_its_inner_spec():
    register("scheme", "wrap")(Wrap)
    value = parse("wrap(int4:group=64,warm,decay=1e-3,cold=false)")
    assert value == Wrap(Integer(4, group=64), decay=1e-3, warm=True, cold=False)
    assert str(value) == "wrap(int4:group=64,decay=0.001,warm,cold=false)"


@pytest.mark.usefixtures("registry")
def test_a_taken_name_is_refused():
    with pytest.raises(ValueError, match="'int4' is taken by Integer"):
        register("scheme", "int4")(Wrap)


@pytest.mark.parametrize("name", ["Int4", "4bit", "a b", "a:b", ""])
def test_a_name_that_the_grammar_cannot_read_is_refused(name):
    with pytest.raises(ValueError, match="is no spec name"):
        register_codec(name)


class Plain(Codec):
    """No dataclass of its own, so its fields would be no options."""

    keep: int = 2

    def row_nbytes(self, n, dtype):
        return n


@dataclasses.dataclass
class Thawed(Named):
    pass


@dataclasses.dataclass(frozen=True)
class Short(Codec):
    """Lacks row_nbytes."""


@dataclasses.dataclass(frozen=True)
class NoStateless(Scheme):
    def sender(self):
        raise NotImplementedError

    def receiver(self):
        raise NotImplementedError

    def row_nbytes(self, n, dtype):
        raise NotImplementedError


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("add", "cls", "message"),
    [
        (register("codec", "wrong"), int, "int must be a frozen dataclass derived from tw.Codec"),
        (register("scheme", "wrong"), Thawed, "a frozen dataclass derived from tw.Scheme"),
        (register_codec("wrong"), Plain, "Plain must be a frozen dataclass"),
        (register_codec("wrong"), Short, "Short has no row_nbytes, which every codec needs"),
        (register_codec("wrong"), Wrap, "derived from neither tw.TensorCodec nor tw.Codec"),
        (register_scheme("wrong"), Wrap, "Wrap is not derived from tw.Scheme"),
        (register_scheme("wrong"), NoStateless, "NoStateless has no stateless"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_when_it_is_registered(add, cls, message):
    with pytest.raises(ValueError, match=message):
        add(cls)
    assert "wrong" not in names()


def again(default):
    """A class as a notebook defines it each time that its cell is run."""

    @dataclasses.dataclass(frozen=True)
    class Again(Short):
        keep: int = default

        def row_nbytes(self, n, dtype):
            return n

    return Again


@pytest.mark.usefixtures("registry")
def test_a_class_that_is_defined_again_takes_the_place_of_the_one_before():
    register_codec("again")(again(1))
    register_codec("again")(again(2))
    assert parse("again") == parse("again:keep=2")


@pytest.mark.usefixtures("registry")
def test_an_option_that_a_class_itself_refuses_is_a_spec_error():
    @register_codec("picky")
    @dataclasses.dataclass(frozen=True)
    class Picky(Short):
        keep: int = 1

        def __post_init__(self):
            if self.keep > 3:
                raise ValueError("keep is at most 3")

        def row_nbytes(self, n, dtype):
            return n

    with pytest.raises(SpecError, match="in spec 'picky:keep=9': keep is at most 3"):
        parse("picky:keep=9")


@pytest.mark.usefixtures("registry")
def test_the_simplest_spec_of_a_name_has_what_is_required_and_no_more():
    register("scheme", "wrap")(Wrap)
    for name in ("int4", "raw", "tile"):
        assert simplest(name) == name
    assert simplest("topk") == "topk:0.1"
    assert [simplest(name) for name in ("delta", "wrap")] == ["delta(int8)", "wrap(int8)"]
    register("codec", "bits")(Integer)
    with pytest.raises(SpecError, match="bits needs bits, of which no example is known"):
        simplest("bits")


def test_names_are_listed_by_kind():
    assert {"raw", "bf16", "fp16", "fp8", "int1", "int8"} <= set(names("codec"))
    assert "delta" in names("scheme")
    assert "delta" not in names("codec")
