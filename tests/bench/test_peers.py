"""Whether the peers do what they are compared for."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from thinwire.bench import peers
from thinwire.bench.codecs import Case, Data
from thinwire.bench.peers import Peer
from thinwire.codecs import codec

NUMEL = 256 * 1024
#: Peer, codec that it is compared to, and its root mean square error on Gaussian values at most.
DECODERS: dict[str, tuple[type[Peer], str, float]] = {
    "fbgemm at 2 bits": (peers.Fbgemm, "int2:group=1024", 0.7),
    "fbgemm at 4 bits": (peers.Fbgemm, "int4", 0.12),
    "fbgemm at 8 bits": (peers.Fbgemm, "int8", 0.01),
    "torch's cast": (peers.TorchCast, "bf16", 0.005),
    "hivemind's ranges": (peers.HivemindUniform8, "int8", 0.02),
    "hivemind's quantiles": (peers.HivemindQuantile8, "int8", 0.05),
    "AC-SGD": (peers.AcSgd, "int4", 0.15),
}


@functools.cache
def data() -> Data:
    return Data(NUMEL)


def error(y: object, x: Tensor) -> float:
    assert isinstance(y, Tensor)
    return float((y.view(-1) - x.view(-1)).square().mean().sqrt())


@pytest.mark.parametrize("what", DECODERS)
def test_a_peer_decodes_what_it_encoded(what: str) -> None:
    cls, spec, most = DECODERS[what]
    assert cls.fits(codec(spec))
    peer = cls(codec(spec), data())
    assert isinstance(peer, peers.Fbgemm | peers.TorchCast | peers.HivemindUniform8 | peers.AcSgd)
    peer.encode()
    assert 0 < error(peer.decode(), peer.x) < most


@pytest.mark.parametrize("share", ["0.01", "0.3"])
def test_torch_keeps_as_many_values_as_ours(share: str) -> None:
    coder = codec(f"topk:{share}")
    theirs = peers.TorchTopK(coder, data()).decode()
    x = data().inputs["fp32"][0].view(1, -1)
    ours = coder.decode(coder.encode(x), x.shape, x.dtype)
    assert isinstance(theirs, Tensor)
    assert torch.equal(theirs.view(1, -1), ours)


def test_dgc_keeps_about_as_many_values_and_not_more() -> None:
    peer = peers.Dgc(codec("topk:0.1"), data())
    found = peer.encode()
    assert isinstance(found, tuple)
    assert 0.08 * NUMEL < found[1].numel() <= 0.1 * NUMEL + 1


@pytest.mark.parametrize("cls", [peers.Fbgemm, peers.AcSgd])
def test_a_step_takes_the_reference_towards_the_input(cls: type[Peer]) -> None:
    here = Data(NUMEL)
    peer = cls(codec("int4"), here)
    assert isinstance(peer, peers.Fbgemm | peers.AcSgd)
    m = here.reference("fp32").kept if isinstance(peer, peers.Fbgemm) else peer.m
    before = error(m, here.inputs["fp32"][1])
    peer.delta_encode()
    assert error(m, here.inputs["fp32"][1]) < 0.2 * before


@pytest.mark.parametrize("cls", [peers.Fbgemm, peers.AcSgd])
def test_decoding_a_change_and_its_opposite_returns_to_the_start(cls: type[Peer]) -> None:
    here = Data(NUMEL)
    peer = cls(codec("int4"), here)
    assert isinstance(peer, peers.Fbgemm | peers.AcSgd)
    peer.delta_decode()
    moved = peer.delta_decode()
    assert error(moved, here.inputs["fp32"][0]) < 0.02


@pytest.mark.parametrize("spec", ["int4:symmetric", "int4:round=stochastic", "int3", "tile"])
def test_codecs_that_no_peer_has_are_measured_alone(spec: str) -> None:
    assert list(peers.Peers(data()).tasks(Case("encode", codec(spec), "fp32"))) == []


def test_no_peer_is_set_against_bf16() -> None:
    assert list(peers.Peers(data()).tasks(Case("encode", codec("int4"), "bf16"))) == []
