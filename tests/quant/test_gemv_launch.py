"""How products are spread over a GPU, for every shape of the family; and the files that keep compiled kernels."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from quant.kernels import nvrtc
from quant.kernels.gemv import ALIGNMENT, Form, choose, straight
from quant.kernels.targets import SHARED_BYTES

# 2B, 8B, 0.5B, 3-4B, a tiny one; the heads.
SHAPES = [
    (6912, 2304, False), (2304, 2304, False), (11520, 2304, True), (2304, 5760, False), (122753, 2304, False),
    (4608, 4096, False), (32768, 4096, True), (4096, 16384, False), (73448, 4096, False), (1024, 1024, False),
    (12800, 2560, True), (2560, 6400, False), (1056, 288, False), (288, 576, False), (6, 64, True), (1, 32, False),
]  # fmt: skip


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize(("n", "k", "gated"), SHAPES)
def test_a_launch_that_the_gpu_takes(n: int, k: int, gated: bool, bits: int, rows: int) -> None:
    for group in (k,) if bits == 16 else (32, 128, k):
        if k % group:
            continue
        form = Form(bits, False).for_rows(rows)
        launch = choose(form, n, k, k // group, gated)
        assert 1 <= launch.blocks <= launch.outputs == (n // 2 if gated else n)
        assert launch.shared_bytes <= SHARED_BYTES
        assert launch.threads <= 384


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sources compiled so far; the machine code of one is its text in capitals."""
    sources: list[str] = []

    def compile_cubin(source: str, options: tuple[str, ...], arch: str) -> bytes:
        sources.append(source)
        return source.upper().encode()

    monkeypatch.setattr(nvrtc, "compile_cubin", compile_cubin)
    monkeypatch.setattr(nvrtc, "_key", lambda source, options, arch: f"{source}{len(options)}{arch}")
    return sources


def test_a_kernel_is_compiled_once(compiled: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "not there yet"
    for _ in range(3):
        assert nvrtc.cached_cubin("a", (), "sm_90", folder) == b"A"
    assert nvrtc.cached_cubin("a", ("-DX",), "sm_90", folder) == b"A"
    assert compiled == ["a", "a"]
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 64])
def test_a_damaged_file_is_compiled_again(compiled: list[str], tmp_path: Path, damage: bytes) -> None:
    nvrtc.cached_cubin("a", (), "sm_90", tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage)
    assert nvrtc.cached_cubin("a", (), "sm_90", tmp_path) == b"A"
    assert (file.read_bytes(), compiled) == (whole, ["a", "a"])


def test_a_folder_that_cannot_be_written_is_no_error(compiled: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert nvrtc.cached_cubin("a", (), "sm_90", tmp_path / "file") == b"A"
    assert nvrtc.cached_cubin("a", (), "sm_90", None) == b"A"


def test_inputs_that_lie_askew_are_copied() -> None:
    whole = torch.randn(1, 64).bfloat16()
    for part in (whole[:, 3:35], whole[:, ::2], torch.randn(32, 4).bfloat16().T):
        found = straight(part)
        assert torch.equal(found, part)
        assert found.is_contiguous()
        assert found.data_ptr() % ALIGNMENT == 0
    assert straight(whole[:, 8:40]).data_ptr() == whole[:, 8:40].data_ptr()


def test_a_kernel_is_built_for_its_own_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    current, asked = [], []
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: {"cuda:0": (9, 0), "cuda:1": (8, 6)}[device]
    )
    monkeypatch.setattr(torch.cuda, "device", lambda device: current.append(device) or nullcontext())
    monkeypatch.setattr(torch, "zeros", lambda n, device: current.append(device))
    monkeypatch.setattr(nvrtc, "cached_cubin", lambda *given: asked.append(given) or b"code")
    monkeypatch.setattr(nvrtc, "load", lambda *given: given)
    for device, feature in (("cuda:0", "a"), ("cuda:1", "")):
        built = nvrtc.build("f", "text", ("-DX",), device, 99, tmp_path, feature)  # type: ignore[arg-type]
        assert built == (b"code", "f", 99)
    assert asked == [("text", ("-DX",), arch, tmp_path) for arch in ("sm_90a", "sm_86")]
    assert current == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
