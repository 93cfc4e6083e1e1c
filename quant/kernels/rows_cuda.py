"""Packed products of a batch of rows on Hopper: what the kernel in rows.cu is told."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from quant.kernels import nvrtc
from quant.kernels.layout import DeviceInt
from quant.layers.around import Gate

SOURCE = Path(__file__).with_name("rows.cu")
SCALES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
GATES = {"silu": 1, "relu": 2}
STAGE = 128  # columns
SHARED_BYTES = 227 << 10  # that a block may have on Hopper
BLOCK_BYTES = 110 << 10  # that it is given, so that another finds room beside it
PROCESSORS = 132  # of an H200; another number changes the speed only
WHOLE_ROW = 1 << 20  # RUN where a row has one scale


class Parameters(ctypes.Structure):
    """`Params` of the kernel, field by field."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
        ("shift", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("onto", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("N", ctypes.c_int),
        ("K", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("T", ctypes.c_int),
        ("stride", ctypes.c_int),
        ("experts", ctypes.c_int),
        ("active", ctypes.c_int),
        ("alpha", ctypes.c_float),
        ("threshold", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class Form:
    """What the kernel is compiled for."""

    bits: int
    half: bool  # float16, else bfloat16
    scale: int
    kind: int  # 0: every zero point is the middle; 1: zero points; 2: shifts
    run: int  # columns under one scale, in units of 32
    batch: int  # rows of x in a block, a multiple of 8
    warp_groups: int  # of 64 rows of W each in a block
    parts: int  # of the columns, a block each: a cluster of at most 8
    depth: int  # stages of the ring
    gate: int = 0
    experts: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        names = ("BITS", "HALF", "SCALE", "KIND", "RUN", "NT", "WG", "PARTS", "DEPTH", "GATE", "EXPERTS")
        return tuple(f"-D{name}={int(value)}" for name, value in zip(names, astuple(self), strict=True))

    @property
    def rows(self) -> int:
        return 64 * self.warp_groups

    @property
    def outputs(self) -> int:
        return self.rows // 2 if self.gate else self.rows

    def shared_bytes(self, k: int, groups: int) -> int:
        ring = self.depth * (self.batch * STAGE * 2 + self.rows * STAGE * self.bits // 8)
        sums = self.batch * (self.rows + 4) * 4
        stages = (k + STAGE - 1) // STAGE
        columns = (stages + self.parts - 1) // self.parts * STAGE
        here = min(groups, columns // (32 * self.run) + 2)
        return 1024 + max(ring, sums) + here * self.rows * 4 * (self.kind + 1)


def source(form: Form) -> str:
    """The kernel behind the one instruction whose operands are as many as the form says."""
    n, kind = form.batch // 2, "f16" if form.half else "bf16"
    sums, a = ", ".join(f"%{i}" for i in range(n)), ", ".join(f"%{n + i}" for i in range(4))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(n))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{form.batch}k16.f32.{kind}.{kind}"
    lines = (
        "typedef unsigned int u32;",
        "typedef unsigned short u16;",
        "typedef unsigned char u8;",
        "typedef unsigned long long u64;",
        f"__device__ __forceinline__ void multiply(float (&d)[{n}], u32 a0, u32 a1, u32 a2, u32 a3, u64 x) {{",
        '    asm volatile("{\\n.reg .pred p;\\nsetp.eq.u32 p, 1, 1;\\n"',
        f'                 "{instruction} {{{sums}}}, {{{a}}}, %{n + 4}, p, 1, 1, 0;\\n}}"',
        f'                 : {operands} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(x));',
        "}",
    )
    return "\n".join(lines) + "\n" + SOURCE.read_text()


@functools.cache
def unavailable(device: torch.device) -> str | None:
    """Why the kernel cannot run on this device; None where it can. wgmma is Hopper's own."""
    if device.type != "cuda":
        return "it is not a CUDA device"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "its compute capability is not 9.0"
    return nvrtc.unavailable()


def supported(w: DeviceInt, dtype: torch.dtype) -> bool:
    """Rows of whole 16-byte pieces, groups of whole 32 columns or of a whole row."""
    fits = w.K % 32 == 0 and (w.group % 32 == 0 or w.group == w.K) and w.words.data_ptr() % 16 == 0
    return fits and dtype in (torch.bfloat16, torch.float16) and unavailable(w.words.device) is None


def form_of(
    w: DeviceInt,
    dtype: torch.dtype,
    batch: int,
    warp_groups: int,
    parts: int,
    depth: int = 3,
    gate: Gate | None = None,
) -> Form:
    kind = 2 if w.shift is not None else 0 if w.zero is None else 1
    run = WHOLE_ROW if w.group == w.K else w.group // 32
    bits = w.bits, dtype == torch.float16, SCALES[w.scale.dtype], kind, run
    return Form(*bits, batch, warp_groups, parts, depth, GATES[gate.kind] if gate else 0)


def product(
    x: Tensor,  # [T, K]
    w: DeviceInt,
    onto: Tensor | None = None,  # [T, N], or N/2 behind a gate
    alpha: float = 1.0,
    folder: Path | None = None,
    gate: Gate | None = None,
    form: Form | None = None,
) -> Tensor:  # [T, N]
    """onto + alpha * gate(x @ W^T); `form`: another than `choose` would take."""
    out = x.new_empty(len(x), w.N // 2 if gate else w.N)
    if len(x):
        form = form or choose(len(x), w, x.dtype, gate)
        launch(form, x, w, out, -(-len(x) // form.batch), Around(onto, alpha, gate), folder)
    return out


class Around(NamedTuple):
    """What the product stands in: a sum, a gate, a mixture of experts."""

    onto: Tensor | None = None
    alpha: float = 1.0
    gate: Gate | None = None
    order: Tensor | None = None  # [pairs] int32: pairs (token * active + place), sorted by expert
    starts: Tensor | None = None  # [experts + 1] int32: where each expert's pairs begin in `order`
    active: int = 0  # 0: x is in the experts' order itself


def choose(rows: int, w: DeviceInt, dtype: torch.dtype, gate: Gate | None = None) -> Form:
    """The form by the sizes, as measured on an H200."""
    batch = next(b for b in (16, 32, 48, 64) if b >= min(rows, 64))
    warp_groups = 2
    tiles = -(-w.N // (64 * warp_groups)) * -(-rows // batch)
    parts = max(1, min(PROCESSORS // tiles, 8, -(-w.K // STAGE) // 3))
    return _deep(form_of(w, dtype, batch, warp_groups, parts, gate=gate), w)


def choose_experts(pairs: int, experts: int, w: DeviceInt, dtype: torch.dtype, gate: Gate | None) -> Form:
    """For `pairs` of a token and an expert; `w` holds all experts' rows."""
    most = -(-pairs // min(experts, pairs))
    batch = next(b for b in (8, 16, 32, 48, 64) if b >= min(most + most // 3, 64))
    tiles = w.N // experts // 64 * min(experts, pairs)
    parts = max(1, min(2 * PROCESSORS // tiles, 8, -(-w.K // STAGE) // 3))
    return replace(_deep(form_of(w, dtype, batch, 1, parts, gate=gate), w), experts=True)


def _deep(form: Form, w: DeviceInt) -> Form:
    """With as many stages as there are to fill, and memory for."""
    form = replace(form, depth=max(3, min(8, -(-w.K // STAGE) // form.parts + 2)))
    while form.depth > 3 and form.shared_bytes(w.K, w.scale.shape[1]) > BLOCK_BYTES:
        form = replace(form, depth=form.depth - 1)
    return form


def launch(form: Form, x: Tensor, w: DeviceInt, out: Tensor, batches: int, around: Around, folder: Path | None) -> None:
    """Fills `out` [*, N]; `batches`: how many tiles of `form.batch` rows of x there are, or may be."""
    experts = 0 if around.starts is None else len(around.starts) - 1
    rows = x if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()
    onto = None if around.onto is None else around.onto.contiguous()
    blocks = -(-out.shape[1] // form.outputs) * batches * form.parts
    launcher, p = _launcher(form, blocks, form.shared_bytes(w.K, w.scale.shape[1]), x.device, folder)
    p.weight, p.scale, p.zero, p.shift = _address(w.words), _address(w.scale), _address(w.zero), _address(w.shift)
    p.x, p.onto, p.out, p.order, p.starts = map(_address, (rows, onto, out, around.order, around.starts))
    p.N, p.K, p.groups, p.T, p.stride = out.shape[1], w.K, w.scale.shape[1], len(rows), 2 * rows.stride(0)
    p.experts, p.active, p.alpha = experts, around.active, around.alpha
    p.threshold = around.gate.threshold if around.gate else 0.0
    launcher(torch.cuda.current_stream(x.device).cuda_stream)


def _address(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


@functools.cache
def _launcher(
    form: Form, blocks: int, shared_bytes: int, device: torch.device, folder: Path | None
) -> tuple[nvrtc.Launcher, Parameters]:
    parameters = Parameters()
    return kernel(form, device, folder).launcher(blocks, 128 * form.warp_groups, shared_bytes, parameters), parameters


@functools.cache
def kernel(form: Form, device: torch.device, folder: Path | None) -> nvrtc.Kernel:
    """Compiled or read from `folder` once a process and device."""
    with torch.cuda.device(device):
        cubin = nvrtc.cached_cubin(source(form), form.options, "sm_90a", folder)
        return nvrtc.load(cubin, "rows", SHARED_BYTES)
