"""The same bytes on every ISA, device, thread count and default dtype."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.native import digest as script
from tests.native.digest import GOLDEN, digest
from thinwire.codecs import codec


@pytest.mark.parametrize("capability", ["default", "avx2", None])
def test_bytes_do_not_depend_on_the_isa(capability):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    environment.pop("ATEN_CPU_CAPABILITY", None)
    if capability is not None:
        environment["ATEN_CPU_CAPABILITY"] = capability
    done = subprocess.run(
        [sys.executable, script.__file__],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert json.loads(done.stdout) == GOLDEN


def test_bytes_do_not_depend_on_the_device(device):
    assert digest(device) == GOLDEN


def test_bytes_do_not_depend_on_the_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        assert digest() == GOLDEN
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("spec", ["int4", "int2", "int2:round=stochastic", "int6:scale=std"])
def test_bytes_do_not_depend_on_the_number_of_threads(spec):
    x = script.integers(40 * 2048, 3).to(torch.float32).view(40, 2048)
    threads = torch.get_num_threads()
    payloads = []
    for count in (1, 2):
        torch.set_num_threads(count)
        payloads.append(codec(spec).encode(x))
    torch.set_num_threads(threads)
    assert torch.equal(*payloads)
