"""The CUDA kernel's own text, compiled for the CPU and run thread by thread, against float64."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quant.kernels import copy_engine, rows_bulk
from quant.kernels.layout import DeviceInt
from quant.kernels.rows_cuda import COMMON, SOURCE, Around, Form, Parameters, fill, form_of
from quant.layers.around import Gate
from steps import relative_error

EMULATOR = Path(__file__).with_name("rows_emulator.cpp")
# Scales, weights and results are rounded to the activations' type.
BOUND = {torch.bfloat16: 5e-3, torch.float16: 8e-4}
BF16, F16 = BOUND
Emulate = Callable[[Form | rows_bulk.Form], ctypes.CDLL]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulate:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile the emulated kernel")
    folder, libraries = tmp_path_factory.mktemp("rows"), dict[Form | rows_bulk.Form, ctypes.CDLL]()

    def library(form: Form | rows_bulk.Form) -> ctypes.CDLL:
        if form not in libraries:
            to = folder / f"{len(libraries)}.so"
            kernel = SOURCE if isinstance(form, Form) else rows_bulk.SOURCE
            options = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w", f'-DKERNEL="{kernel}"']
            options += [f'-DCOMMON="{COMMON}"', *form.options]
            subprocess.run([compiler, *options, "-o", str(to), str(EMULATOR)], check=True)
            libraries[form] = ctypes.CDLL(str(to))
        return libraries[form]

    return library


def packed(n: int, k: int, bits: int, group: int, kind: str) -> DeviceInt:
    g = torch.Generator().manual_seed(n + k)
    words = torch.randint(-(2**31), 2**31, (n, k * bits // 32), generator=g, dtype=torch.int64).to(torch.int32)
    scale = (torch.rand(n, k // group, generator=g) * 0.02 + 0.01).to(F16)
    zero = torch.randint(0, 2**bits, scale.shape, generator=g).to(torch.uint8) if kind == "zero" else None
    shift = -scale.float() * (2 ** (bits - 1) + torch.rand(scale.shape, generator=g)) if kind == "shift" else None
    return DeviceInt(bits, group, words, scale, zero, shift)


def run(library: ctypes.CDLL, form: Form, x: Tensor, w: DeviceInt, out: Tensor, batches: int, around: Around) -> Tensor:
    p = Parameters()
    blocks = fill(p, form, x, w, out, batches, around)
    used = library.emulate(ctypes.byref(p), blocks, 0)
    assert 0 < used <= form.shared_bytes(w.K)
    return out


@pytest.mark.parametrize(
    ("rows", "n", "k", "bits", "group", "kind", "dtype", "shape"),
    [
        (10, 66, 288, 4, 32, "zero", BF16, (16, 1, 1, 4)),
        (9, 132, 1056, 4, 96, "shift", BF16, (16, 2, 3, 3)),
        (5, 65, 640, 4, 640, "sym", F16, (8, 1, 2, 5)),
        (17, 64, 320, 8, 64, "zero", BF16, (16, 1, 2, 3)),
        (3, 64, 256, 8, 32, "shift", BF16, (8, 1, 1, 4)),
        (2, 64, 256, 8, 128, "sym", BF16, (8, 1, 1, 4)),
        (4, 68, 384, 8, 128, "zero", F16, (8, 1, 3, 3)),
    ],
)
def test_products(emulated, rows, n, k, bits, group, kind, dtype, shape):
    w, g = packed(n, k, bits, group, kind), torch.Generator().manual_seed(0)
    x, onto = torch.randn(rows, k, generator=g).to(dtype), torch.randn(rows, n, generator=g).to(dtype)
    form = form_of(w, dtype, *shape)
    out = torch.full((rows, n), torch.nan, dtype=dtype)
    run(emulated(form), form, x, w, out, -(-rows // form.batch), Around(onto, 0.5))
    ref = onto.double() + 0.5 * (x.double() @ w.dequantize(torch.float64).T)
    assert relative_error(out, ref) < BOUND[dtype]


@pytest.mark.parametrize(("bits", "n", "gate", "parts"), [(4, 48, Gate("silu"), 2), (8, 33, Gate("relu", 0.5), 1)])
def test_gates(emulated, bits, n, gate, parts):
    w, x = packed(2 * n, 256, bits, 64, "sym"), torch.randn(6, 256, generator=torch.Generator().manual_seed(0)).to(BF16)
    form = form_of(w, BF16, 8, 1, parts, 3, gate)
    out = torch.full((6, n), torch.nan, dtype=BF16)
    run(emulated(form), form, x, w, out, 1, Around(gate=gate))
    assert relative_error(out, gate(x.double() @ w.dequantize(torch.float64).T)) < BOUND[BF16]


def test_experts_take_their_own_tokens(emulated):
    """Three experts, of which the second has none and the third more than a tile."""
    gate, n, k, active = Gate("silu"), 40, 128, 2
    w, x = packed(3 * 2 * n, k, 4, 32, "zero"), torch.randn(7, k, generator=torch.Generator().manual_seed(0)).to(BF16)
    order = torch.tensor([3, 9, 0, 1, 2, 13, 5, 6, 7, 8, 4, 12], dtype=torch.int32)
    starts = torch.tensor([0, 2, 2, 12], dtype=torch.int32)
    form = replace(form_of(w, BF16, 8, 1, 1, 3, gate), experts=True)
    out = torch.full((12, n), torch.nan, dtype=BF16)
    run(emulated(form), form, x, w, out, 3 + 12 // 8, Around(gate=gate, order=order, starts=starts, active=active))
    weights = w.dequantize(torch.float64).view(3, 2 * n, k)
    experts = [0, 0] + [2] * 10
    ref = torch.stack(
        [gate(weights[e] @ x[i // active].double()) for e, i in zip(experts, order.tolist(), strict=True)]
    )
    assert relative_error(out, ref) < BOUND[BF16]


def as_emulated(m: copy_engine.Map) -> bytes:
    """A map as the emulator reads it: in four dimensions."""
    sizes, strides, box = (
        (*given, *[filler] * (n - len(given)))
        for given, filler, n in ((m.sizes, 1, 4), (m.strides, 0, 3), (m.box, 1, 4))
    )
    numbers = m.address, *sizes, *strides, *box, m.number, m.swizzle
    return struct.pack("<8Q6I", *numbers).ljust(copy_engine.MAP_BYTES, b"\0")


@pytest.mark.parametrize(
    ("rows", "n", "k", "bits", "group", "kind", "dtype", "shape", "early"),
    [
        (10, 66, 288, 4, 32, "zero", BF16, (16, 1, 1, 2), 1),
        (5, 132, 544, 4, 32, "shift", BF16, (8, 2, 2, 2), 0),
        (5, 65, 384, 4, 384, "sym", F16, (16, 1, 2, 2), 1),
        (9, 65, 320, 8, 64, "zero", BF16, (8, 1, 1, 2), 0),
        (9, 70, 136, 16, 0, "", BF16, (8, 1, 1, 2), 0),
        (9, 195, 328, 16, 0, "", BF16, (16, 1, 2, 2), 1),
        (5, 130, 456, 16, 0, "", F16, (8, 2, 3, 4), 0),
        (25, 72, 192, 16, 0, "", BF16, (32, 1, 1, 2, 2), 0),
        (5, 136, 448, 16, 0, "", BF16, (8, 2, 1, 2, 4), 1),
    ],
)
def test_products_by_the_copy_engine(emulated, rows, n, k, bits, group, kind, dtype, shape, early):
    """Boxes that come as late, or as early, as they may."""
    g = torch.Generator().manual_seed(0)
    w = packed(n, k, bits, group, kind) if bits < 16 else torch.randn(n, k, generator=g).to(dtype)
    x, onto = torch.randn(rows, k + 8, generator=g).to(dtype)[:, :k], torch.randn(rows, n, generator=g).to(dtype)
    form, out = rows_bulk.form_of(w, dtype, *shape), torch.full_like(onto, torch.nan)
    p = rows_bulk.parameters(form, w, as_emulated)
    rows_bulk.set_call(p, form, x, out, onto, 0.5, as_emulated)
    used = emulated(form).emulate(ctypes.byref(p), form.blocks(n, rows), early)
    assert 0 < used <= form.shared_bytes(k)
    weights = w.double() if isinstance(w, Tensor) else w.dequantize(torch.float64)
    assert relative_error(out, onto.double() + 0.5 * (x.double() @ weights.T)) < BOUND[dtype]
