"""Plans, boundaries and the rows of a step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import thinwire as tw
from thinwire.boundary import Boundary
from thinwire.pipeline.agreement import split_rows
from thinwire.pipeline.plan import Schemes


def test_a_plan_names_the_schemes_of_each_edge() -> None:
    plan = tw.Plan("delta(int4)", "int8", edges={1: ("int2", "int4:symmetric")})
    assert [str(s) for s in plan.schemes(0) or ()] == ["delta(int4)", "int8"]
    assert [str(s) for s in plan.schemes(1) or ()] == ["int2", "int4:symmetric"]


@pytest.mark.parametrize(
    ("epochs", "resting", "scheme"),
    [
        (2.9, False, "tile"),
        (3, False, "delta(int4)"),
        (1.9, True, "tile"),
        (2, True, "delta(int4)"),
    ],
)
def test_the_default_remembers_where_enough_visits_recur(
    epochs: float, resting: bool, scheme: str
) -> None:
    assert tw.default_forward(epochs, resting=resting) == scheme


def test_the_default_leaves_out_what_tokens_tell_where_steps_have_them() -> None:
    assert tw.default_forward(1, tokens=True) == "predicted(tile,by=token+previous)"
    assert tw.default_forward(3, tokens=True) == "delta(int4)"


def test_an_edge_that_is_off_has_no_schemes() -> None:
    assert tw.Plan("off", "off").schemes(0) is None


@pytest.mark.parametrize(("forward", "backward"), [("off", "int8"), ("int4", "off")])
def test_off_in_one_direction_is_refused(forward: str, backward: str) -> None:
    with pytest.raises(tw.SpecError, match="use raw"):
        tw.Plan(forward, backward)


def test_a_wrong_spec_in_an_exception_is_refused() -> None:
    with pytest.raises(tw.SpecError, match="did you mean 'int4'"):
        tw.Plan(edges={0: ("imt4", "int8")})


@given(rows=st.integers(1, 200), microbatches=st.integers(1, 20))
def test_rows_are_split_as_torch_splits_a_batch(rows: int, microbatches: int) -> None:
    ids = list(range(rows))
    found = split_rows(rows, ids, None, microbatches)
    expected = torch.tensor_split(torch.tensor(ids), microbatches)
    assert [list(m.keys or ()) for m in found] == [part.tolist() for part in expected]


@pytest.mark.parametrize(
    ("index", "dtype", "requires_grad", "coded"),
    [
        (0, torch.float32, True, True),
        (0, torch.bfloat16, False, True),  # an activation of frozen layers
        (1, torch.float32, True, True),
        (1, torch.float32, False, False),  # a mask or a table
        (0, torch.int64, False, False),
        (1, torch.bool, False, False),
    ],
)
def test_only_activations_and_tensors_with_gradients_are_coded(
    index: int, dtype: torch.dtype, requires_grad: bool, coded: bool
) -> None:
    assert Boundary(index, (2, 8, 4), dtype, requires_grad).coded == coded


def test_activations_are_not_predicted_by_themselves() -> None:
    for spec in ("predicted(int4,by=token+activation)", "delta(int4,by=activation)"):
        with pytest.raises(tw.SpecError, match="activations are known once they have travelled"):
            tw.Plan(spec, "int4")
    tw.Plan("int4", "predicted(int4,by=activation)")


def test_a_stage_without_example_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="input_args and output_args are needed"):
        tw.PipelineStage(torch.nn.Linear(2, 2), 0, 1, "cpu")


def test_the_loss_is_a_mean_over_valid_tokens() -> None:
    loss = tw.TokenLoss()
    logits, target = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    target[0, 2:] = -100
    loss.count = loss.tokens(target)
    parts = sum(loss(logits[i : i + 1], target[i : i + 1]) for i in range(3))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    assert loss.count == 12
    assert torch.allclose(torch.as_tensor(parts), expected)


@pytest.mark.parametrize(
    ("forward", "backward", "said"),
    [
        ("topk:0.1", "topk:0.1", "backward topk:0.1 chooses positions of its own"),
        ("ef(topk:0.1)", "ef(topk:0.2)", "backward ef(topk:0.2) chooses positions of its own"),
        ("ef(topk:0.1,key=slot)", "int8", "tells rows apart by their place in the batch"),
        ("topk:0.1", "topk:0.1,mask=shared", None),
        ("delta(topk:0.1)", "topk:0.1", "delta(topk:0.1) sends less than 30 % of each change"),
        ("delta(topk:0.3)", "topk:0.1", None),
        ("delta(int2)", "int8", None),
        ("topk:0.1", "int8", None),
    ],
)
def test_plans_that_are_known_to_do_harm_are_warned_of(
    forward: str, backward: str, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    Schemes(tw.Plan(forward, backward), edges=3).warn()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (0 if said is None else 1)
    assert said is None or said in messages[0]
