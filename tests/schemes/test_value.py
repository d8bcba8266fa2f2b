"""Plain values: no history, no state."""

import pytest
import torch

from tests.schemes.links import WIDTH, Link, full, normal, visit
from thinwire.codecs import codec
from thinwire.errors import FrameError, NonFiniteError
from thinwire.schemes import Value, scheme


def test_a_bare_codec_names_the_scheme_of_plain_values():
    assert scheme("int8") == Value(codec("int8"))
    assert str(scheme("int8:symmetric")) == "int8:symmetric"


@pytest.mark.parametrize("spec", ["raw", "bf16", "int8", "int2"])
def test_a_value_is_what_its_codec_makes_of_it(spec):
    x, coder = normal(3, WIDTH), codec(spec)
    assert Link(spec).step(x, range(3)).equal(coder.decode(coder.encode(x), x.shape, x.dtype))


def test_the_error_of_a_gradient_does_not_depend_on_earlier_visits():
    link, x = Link("int8"), normal(2, WIDTH)
    first = link.step(x, [1, 2])
    for _ in range(3):
        link.step(normal(2, WIDTH, seed=9), [1, 2])
    assert link.step(x, [1, 2]).equal(first)
    assert link.sender.state_dict() == {}


def test_values_need_no_sample_ids():
    link, x = Link("int8"), normal(2, WIDTH)
    there = visit(None, [WIDTH, WIDTH])
    link.begin(there)
    assert link.move(x, 0, there).shape == x.shape


def test_padding_is_left_out_of_a_value():
    link, x = Link("int8"), torch.full((2, WIDTH), 1e6)
    x[:, :40] = normal(2, 40)
    there = visit([1, 2], [40, 40])
    link.begin(there)
    found = link.move(x, 0, there)
    assert float((found[:, :40] - x[:, :40]).abs().max()) < 0.05
    assert not found[:, 40:].any()


def test_a_value_that_is_not_finite_is_an_error():
    x = normal(2, WIDTH)
    x[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"nan at index \(0, 0\)"):
        Link("int8").step(x, [1, 2])


def test_a_value_in_another_codec_is_refused():
    sections = Link("int4").sender.encode(normal(2, WIDTH), 0, full([1, 2]))
    with pytest.raises(FrameError, match="coded as 'int4', this end expects int8"):
        Link("int8").receiver.decode(sections, 0, full([1, 2]))
