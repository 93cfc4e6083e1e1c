"""Which kernels are taken on which GPU, by what torch says of it; no GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from quant.kernels import nvrtc, targets

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


@pytest.fixture(autouse=True)
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper, which is the current one, and beside it whatever `describe` makes of the second."""
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    monkeypatch.setattr(targets, "find_spec", lambda _: True)
    monkeypatch.setattr(targets, "unavailable", targets.unavailable.__wrapped__)
    monkeypatch.setattr(targets, "triton_compiles", targets.triton_compiles.__wrapped__)


def describe(monkeypatch: pytest.MonkeyPatch, major: int, minor: int, shared: int) -> None:
    gpus = {
        FIRST: SimpleNamespace(major=9, minor=0, shared_memory_per_block_optin=232_448),
        SECOND: SimpleNamespace(major=major, minor=minor, shared_memory_per_block_optin=shared),
    }
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: (gpus[d].major, gpus[d].minor))


@pytest.mark.parametrize(
    ("major", "minor", "shared", "why"),
    [
        (9, 0, 232_448, None),
        (10, 0, 232_448, None),
        (12, 0, 101_376, "a block of the GPU has 99 KB of shared memory; the kernels need 227 KB"),
        (8, 6, 101_376, "the GPU's compute capability is 8.6; the kernels need 9.0 (Hopper) or later"),
        (7, 5, 65_536, "the GPU's compute capability is 7.5; the kernels need 9.0 (Hopper) or later"),
    ],
)
def test_compiled_kernels_need_the_devices_own_instructions_and_memory(
    major: int, minor: int, shared: int, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe(monkeypatch, major, minor, shared)
    assert targets.unavailable(SECOND) == why
    assert targets.unavailable(FIRST) is None


def test_what_nvrtc_lacks_is_said_of_a_fitting_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    describe(monkeypatch, 9, 0, 232_448)
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "no bindings")
    assert targets.unavailable(SECOND) == "no bindings"


@pytest.mark.parametrize(("major", "minor", "compiles"), [(7, 5, False), (8, 0, True), (9, 0, True)])
def test_triton_compiles_from_ampere_on(
    major: int, minor: int, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe(monkeypatch, major, minor, 65_536)
    assert targets.triton_compiles(SECOND) is compiles
