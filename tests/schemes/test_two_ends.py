"""The two ends in processes of their own, on different instruction sets: equal to the bit."""

from typing import Any

import pytest

from tests.distributed.pool import Pool
from tests.schemes.links import (
    WIDTH,
    Link,
    mixed_step,
    normal,
    off_the_wire,
    on_the_wire,
    visits_of,
)
from thinwire.frame import Kind
from thinwire.network import GlooTransport
from thinwire.predict import fit
from thinwire.schemes import scheme

STEPS = 1000
SPECS = [
    "delta(int4)",
    "delta(int2,first=int4)",
    "delta(int4:round=stochastic,first=fp16)",
    "ef21(topk:0.2,ref=bf16)",
    "delta(int2,first=int4,by=token+position+drift)",
]


def one_end(rank: int, world_size: int, spec: str, steps: int) -> list[int]:
    """Rank 0 sends, rank 1 receives; a digest of the references every 100 steps."""
    vars(fit)["_SHARE"] = 0.02  # a map now and then
    transport = GlooTransport()
    end: Any = scheme(spec).sender() if rank == 0 else scheme(spec).receiver()
    digests, maps = [], 0
    for number in range(steps):
        step = mixed_step(number)
        visits = visits_of(number, step)
        end.begin_step(visits)
        for k, (there, x) in enumerate(zip(visits, step[1], strict=True)):
            if rank == 0:
                sections = end.encode(x, k, there)
                maps += sum(section.kind == Kind.MAP for section in sections)
                transport.send(1, k, [on_the_wire(sections)])
            else:
                data = transport.wait(transport.post_receive(0, k, 1 << 14), 30)
                end.decode(off_the_wire(data), k, there)
        end.end_step()
        if number % 10 == 0:
            Link(spec).evaluate(normal(2, WIDTH))
        if number % 100 == 99:
            digests.append(end.digest())
            transport.flush(30)
    assert maps > 5 or rank == 1 or "drift" not in spec
    return digests


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("plain", [0, 1], ids=["at the sender", "at the receiver"])
def test_references_are_equal_to_the_bit_with_the_baseline_instruction_set(
    pool: Pool, spec: str, plain: int
):
    env: list[dict[str, str]] = [{}, {}]
    env[plain] = {"ATEN_CPU_CAPABILITY": "default"}
    steps = STEPS if (spec, plain) in ((SPECS[0], 1), (SPECS[-1], 0)) else STEPS // 5
    sent, received = pool.run(one_end, spec, steps, env=env)
    assert sent == received
    assert len(sent) == len(set(sent)) == steps // 100
