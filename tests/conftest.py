"""Fixtures for all tests: the devices, and the worker processes of a session."""

import signal
from collections.abc import Iterator

import pytest
import torch

import thinwire.schemes  # noqa: F401  registers what is built in
from tests.distributed.pool import Pool
from thinwire import plugins, spec

# as in the workers: reductions depend on the number of threads, and cores are shared
torch.set_num_threads(1)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that the code should work on."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device: torch.cuda.is_available() is false")
    return torch.device(request.param)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registrations that end with the test."""
    monkeypatch.setattr(spec, "_REGISTRY", dict(spec._REGISTRY))
    monkeypatch.setattr(plugins, "_registered", {})


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for distributed tests; none is started before the first run."""
    with Pool() as workers:
        yield workers


@pytest.fixture(scope="session", autouse=True)
def _hangups_are_heeded() -> Iterator[None]:
    """Also where the tests themselves run under ``nohup``, which has SIGHUP ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
