"""The CUDA kernel's own text, compiled for the CPU and run thread by thread, against float64."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quant.kernels.gemv import Form, Launch, form_of, parameters, set_call
from quant.kernels.layout import DeviceInt, pack
from quant.layers.around import Gate, Norm, around
from quant.pack import GroupInt
from steps import relative_error

EMULATOR = Path(__file__).with_name("gemv_emulator.cpp")
ROUNDING = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
FIXED_POINT = 5e-5  # x in 16 bits, with a scale of its own every 64 or 128 columns


@dataclass
class Emulator:
    """The kernel's libraries by form."""

    compiler: str
    folder: Path
    libraries: dict[Form, ctypes.CDLL] = field(default_factory=dict)

    def __call__(self, form: Form) -> ctypes.CDLL:
        if form not in self.libraries:
            to = self.folder / f"{len(self.libraries)}.so"
            source = to.with_suffix(".cu")
            source.write_text(form.source)
            options = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w", f'-DKERNEL="{source}"', *form.options]
            subprocess.run([self.compiler, *options, "-o", str(to), str(EMULATOR)], check=True)
            self.libraries[form] = ctypes.CDLL(str(to))
        return self.libraries[form]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile the emulated kernel")
    return Emulator(compiler, tmp_path_factory.mktemp("gemv"))


def integers(bits: int, n: int, k: int, group: int, kind: str, scale: torch.dtype = torch.float16) -> DeviceInt:
    g = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 2**bits, (n, k), generator=g)
    scales = (torch.rand(n, k // group, generator=g) * 0.02 + 0.001).to(scale)
    zeros = torch.randint(0, 2**bits, (n, k // group), generator=g) if kind == "zero" else None
    packed = GroupInt.from_unsigned(bits, group, codes, scales, zeros)
    if kind == "shift":
        packed = replace(packed, zero=None, offset=torch.randn(n, k // group, generator=g).to(scale) * 0.1)
    return pack(packed)


def run(
    library: ctypes.CDLL,
    form: Form,
    spread: tuple[int, int, int],
    weight: Tensor | DeviceInt,
    x: Tensor,
    norm: Norm | None = None,
    gate: Gate | None = None,
    onto: Tensor | None = None,
    alpha: float = 1.0,
    wide: bool = False,
) -> Tensor:
    n, k = weight.shape if isinstance(weight, Tensor) else (weight.N, weight.K)
    groups = 1 if isinstance(weight, Tensor) else weight.scale.shape[1]
    launch = Launch(form, n // 2 if gate else n, k, groups, gate is not None, *spread)
    p = parameters(weight, launch)
    out = torch.full((x.shape[0], launch.outputs), torch.nan, dtype=torch.float32 if wide else x.dtype)
    set_call(p, x, out, norm, gate, onto, alpha)
    library.emulate(ctypes.byref(p), launch.blocks, launch.threads, launch.shared_bytes)
    assert not library.overrun(launch.shared_bytes)
    return out


def plain(n: int, k: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n)).bfloat16()


def inputs(rows: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(9)).to(dtype)


def exactly_normed(x: Tensor, norm: Norm) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()


def check(
    emulated: Emulator, weight: Tensor | DeviceInt, spread: tuple[int, int, int], rows: int = 1,
    dtype: torch.dtype = torch.bfloat16, depth: int = 2, norm: bool = False, gate: Gate | None = None,
    onto: bool = False, wide: bool = False,
) -> None:  # fmt: skip
    form = replace(form_of(weight, dtype), depth=depth).for_rows(rows)
    k = weight.shape[1] if isinstance(weight, Tensor) else weight.K
    n = weight.shape[0] if isinstance(weight, Tensor) else weight.N
    x, before = inputs(rows, k, dtype), Norm(inputs(1, k, dtype)[0].abs(), 1e-5) if norm else None
    base = inputs(rows, n // 2 if gate else n, dtype) if onto else None
    y = run(emulated(form), form, spread, weight, x, before, gate, base, 0.37 if onto else 1.0, wide)
    dense = weight.double() if isinstance(weight, Tensor) else weight.dequantize(torch.float64)
    wide_base = None if base is None else base.double()
    normed = exactly_normed(x, before) if before else x.double()
    exact = around(lambda v: v @ dense.T, normed, None, gate, wide_base, 0.37 if onto else 1.0)
    bound = FIXED_POINT if wide else ROUNDING[dtype]
    assert relative_error(y, exact) < bound * (1.5 if norm else 1)  # normed inputs are rounded too


@pytest.mark.parametrize(
    ("bits", "group", "kind", "dtype", "scale"),
    [
        (4, 128, "middle", torch.bfloat16, torch.float16),
        (4, 384, "shift", torch.float16, torch.float32),
        (4, 64, "zero", torch.bfloat16, torch.bfloat16),
        (4, 96, "middle", torch.float16, torch.float16),
        (4, 32, "shift", torch.bfloat16, torch.float16),
        (8, 128, "middle", torch.bfloat16, torch.float16),
        (8, 32, "zero", torch.bfloat16, torch.float16),
        (8, 96, "shift", torch.float16, torch.float16),
    ],
)
def test_integers(
    emulated: Emulator, bits: int, group: int, kind: str, dtype: torch.dtype, scale: torch.dtype
) -> None:  # fmt: skip
    check(emulated, integers(bits, 21, 384, group, kind, scale), (2, 2, 1), dtype=dtype, wide=True)


@pytest.mark.parametrize("rows", [1, 4, 5, 8])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_rows_of_x(emulated: Emulator, bits: int, rows: int) -> None:
    weight = plain(37, 200) if bits == 16 else integers(bits, 37, 352, 32, "middle")
    check(emulated, weight, (2, 1, 2), rows, norm=True)


@pytest.mark.parametrize("gate", [Gate("silu"), Gate("relu", 0.1), None])
@pytest.mark.parametrize("bits", [4, 16])
def test_what_is_around(emulated: Emulator, bits: int, gate: Gate | None) -> None:
    weight = plain(42, 264) if bits == 16 else integers(bits, 42, 288, 288, "middle")
    check(emulated, weight, (4, 2, 2), 3, gate=gate, onto=True, norm=True)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_fewer_requests_ahead_than_items(emulated: Emulator, depth: int) -> None:
    check(emulated, integers(4, 40, 512, 128, "middle"), (1, 1, 1), 1, depth=depth, wide=True)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("broken", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_a_broken_input_shows_in_its_row_alone(emulated: Emulator, bits: int, broken: float, norm: bool) -> None:
    weight = plain(19, 264) if bits == 16 else integers(bits, 19, 256, 64, "middle")
    k, before = (264, 256)[bits != 16], None
    if norm:
        before = Norm(inputs(1, k, torch.bfloat16)[0].abs(), 1e-5)
    x = inputs(3, k, torch.bfloat16)
    form = form_of(weight, x.dtype).for_rows(3)
    whole = run(emulated(form), form, (1, 2, 1), weight, x, before)
    x[1, 77] = broken
    y = run(emulated(form), form, (1, 2, 1), weight, x, before)
    assert not y[1].isfinite().any()
    assert torch.equal(y[::2], whole[::2])
