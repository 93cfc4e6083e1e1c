"""Packed products of a batch of rows on Hopper: what the kernel in rows.cu is told."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from quant.kernels import nvrtc, targets, trial
from quant.kernels.forms import definitions, kind_of
from quant.kernels.gemv import GATES
from quant.kernels.layout import DeviceInt
from quant.kernels.targets import SHARED_BYTES
from quant.layers.around import Gate

SOURCE = Path(__file__).with_name("rows.cu")
INSTRUCTIONS = Path(__file__).with_name("rows_ptx.cu")
COMMON = Path(__file__).with_name("rows_common.cu")
STAGE = 128  # columns
PROCESSOR_BYTES = 228 << 10
BLOCK_BYTES = 110 << 10  # that it is given, so that another finds room beside it
# Blocks of one warp group that a product is cut into where its tiles of 64 rows are fewer.
BLOCKS = {16: 330, 32: 330, 64: 216}
MANY_TILES = 528  # from which on tiles of 128 rows are faster
ENOUGH_DEPTH = 5  # up to which a block may have all memory
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
        return definitions("BITS HALF SCALE KIND RUN NT WG PARTS DEPTH GATE EXPERTS CHUNKS", (*astuple(self), 1))

    @property
    def rows(self) -> int:
        return 64 * self.warp_groups

    @property
    def outputs(self) -> int:
        return self.rows // 2 if self.gate else self.rows

    def shared_bytes(self, k: int) -> int:
        ring = self.depth * (self.batch * STAGE * 2 + self.rows * STAGE * self.bits // 8)
        sums = self.batch * (self.rows + 4) * 4
        stages = (k + STAGE - 1) // STAGE
        columns = (stages + self.parts - 1) // self.parts * STAGE
        groups = columns // (32 * self.run) + 2  # at most, wherever the part begins
        return 1024 + max(ring, sums) + groups * self.rows * 4 * (self.kind + 1)


def source(form: Form) -> str:
    return text(form.batch, form.half, SOURCE)


def text(batch: int, half: bool, kernel: Path) -> str:
    """A kernel behind the instructions whose operands are as many as the rows of x in a block."""
    n, kind = batch // 2, "f16" if half else "bf16"
    sums, a = ", ".join(f"%{i}" for i in range(n)), ", ".join(f"%{n + i}" for i in range(4))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(n))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{batch}k16.f32.{kind}.{kind}"
    predicate = "{\\n.reg .pred p;\\nsetp.eq.u32 p, 1, 1;\\n"
    lines = (
        "typedef unsigned int u32;",
        "typedef unsigned short u16;",
        "typedef unsigned char u8;",
        "typedef unsigned long long u64;",
        f"__device__ __forceinline__ void multiply(float (&d)[{n}], u32 a0, u32 a1, u32 a2, u32 a3, u64 x) {{",
        f'    asm volatile("{predicate}"',
        f'                 "{instruction} {{{sums}}}, {{{a}}}, %{n + 4}, p, 1, 1, 0;\\n}}"',
        f'                 : {operands} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(x));',
        "}",
        f"__device__ __forceinline__ void multiply_shared(float (&d)[{n}], u64 w, u64 x) {{",
        f'    asm volatile("{predicate}"',
        f'                 "{instruction} {{{sums}}}, %{n}, %{n + 1}, p, 1, 1, 0, 0;\\n}}"',
        f'                 : {operands} : "l"(w), "l"(x));',
        "}",
    )
    return "\n".join(lines) + "\n" + "".join(part.read_text() for part in (INSTRUCTIONS, COMMON, kernel))


@functools.cache
def missing(device: torch.device) -> str | None:
    """What a device lacks of what the kernel needs, wgmma above all, which is Hopper's own; None: nothing."""
    if device.type != "cuda":
        return "it is not a CUDA device"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "its compute capability is not 9.0"
    return targets.unavailable(device)


@functools.cache
def disagreement(form: Form, device: torch.device, folder: Path | None = None) -> str | None:
    """Why a kind of weights cannot be trusted to the kernel on a device, after a small product; None where it can."""
    dtype, n = torch.float16 if form.half else torch.bfloat16, form.rows + 24

    def run(x: Tensor, weight: Tensor | DeviceInt, onto: Tensor) -> Tensor:
        assert isinstance(weight, DeviceInt)
        return product(x, weight, onto, 0.5, folder, form)

    make = functools.partial(trial.weight, form.bits, form.scale, form.kind, form.run, dtype, n, 512, device)
    return trial.disagreement(run, make, form.batch - 3, dtype, device)


def supported(w: DeviceInt, dtype: torch.dtype, folder: Path | None = None) -> bool:
    """Rows of whole 16-byte pieces, groups of whole 32 columns or of a whole row, of a kind that passed its trial."""
    device = w.words.device
    return fits(w, dtype) and not missing(device) and not disagreement(form_of(w, dtype, 16, 1, 2, 4), device, folder)


def fits(w: DeviceInt, dtype: torch.dtype) -> bool:
    groups = w.group % 32 == 0 or w.group == w.K
    return w.K % 32 == 0 and groups and w.words.data_ptr() % 16 == 0 and dtype in (torch.bfloat16, torch.float16)


def form_of(
    w: DeviceInt,
    dtype: torch.dtype,
    batch: int,
    warp_groups: int,
    parts: int,
    depth: int = 3,
    gate: Gate | None = None,
) -> Form:
    kind = GATES[gate.kind] if gate else 0
    return Form(*kind_of(w, dtype), run_of(w), batch, warp_groups, parts, depth, kind)


def run_of(w: DeviceInt) -> int:
    """Columns under one scale, in units of 32."""
    return WHOLE_ROW if w.group == w.K else w.group // 32


def product(
    x: Tensor,  # [T, K]
    w: DeviceInt,
    onto: Tensor | None = None,  # [T, N]
    alpha: float = 1.0,
    folder: Path | None = None,
    form: Form | None = None,
) -> Tensor:  # [T, N]
    """onto + alpha * x @ W^T; `form`: another than `choose` would take."""
    out = x.new_empty(len(x), w.N)
    if len(x):
        form = form or choose(len(x), w, x.dtype)
        launch(form, x, w, out, -(-len(x) // form.batch), Around(onto, alpha), folder)
    return out


class Around(NamedTuple):
    """What the product stands in: a sum, a gate, a mixture of experts."""

    onto: Tensor | None = None
    alpha: float = 1.0
    gate: Gate | None = None
    order: Tensor | None = None  # [pairs] int32: pairs (token * active + place), sorted by expert
    starts: Tensor | None = None  # [experts + 1] int32: where each expert's pairs begin in `order`
    active: int = 0  # 0: x is in the experts' order itself


def choose(rows: int, w: DeviceInt, dtype: torch.dtype) -> Form:
    """The form by the sizes, as measured on an H200."""
    batch = next(b for b in (16, 32, 64) if b >= min(rows, 64))
    batches, tiles = -(-rows // batch), -(-w.N // 64)
    wide = _deep(form_of(w, dtype, batch, 2, 1), w, batches)
    if batch == 64 and tiles * batches > MANY_TILES and wide.shared_bytes(w.K) <= SHARED_BYTES:
        return wide
    most = max(1, min(8, -(-w.K // STAGE) // 2))
    parts = max(1, min(most, round(BLOCKS[batch] / (tiles * batches))))
    return _fitting(form_of(w, dtype, batch, 1, parts), w, batches)


def choose_experts(pairs: int, experts: int, w: DeviceInt, dtype: torch.dtype, gate: Gate | None) -> Form:
    """For `pairs` of a token and an expert; `w` holds all experts' rows."""
    most = -(-pairs // min(experts, pairs))
    batch = next(b for b in (8, 16, 32, 48, 64) if b >= min(most + most // 3, 64))
    tiles = max(1, w.N // experts // 64) * min(experts, pairs)
    parts = max(1, min(2 * PROCESSORS // tiles, 8, -(-w.K // STAGE) // 3))
    return replace(_fitting(form_of(w, dtype, batch, 1, parts, gate=gate), w), experts=True)


def _fitting(form: Form, w: DeviceInt, batches: int = 1) -> Form:
    """Of as few parts, from the form's own on, as have room for the scales of their columns."""
    forms = (_deep(replace(form, parts=parts), w, batches) for parts in range(form.parts, 9))
    return next(f for f in forms if f.parts == 8 or f.shared_bytes(w.K) <= SHARED_BYTES)


def _deep(form: Form, w: DeviceInt, batches: int = 1) -> Form:
    """With as many stages as there are to fill, and memory for beside the blocks that share a processor with it."""
    blocks = -(-w.N // form.rows) * batches * form.parts
    sharing = min(-(-blocks // PROCESSORS), 4 // form.warp_groups)
    depth = max(3, min(8, -(-w.K // STAGE) // form.parts + 2))
    for form in (replace(form, depth=d) for d in range(depth, 2, -1)):
        alone = BLOCK_BYTES if form.depth > ENOUGH_DEPTH else SHARED_BYTES
        if form.shared_bytes(w.K) <= (alone if sharing <= 1 else PROCESSOR_BYTES // sharing - 1024):
            break
    return form


def launch(form: Form, x: Tensor, w: DeviceInt, out: Tensor, batches: int, around: Around, folder: Path | None) -> None:
    """Fills `out` [*, N]; `batches`: how many tiles of `form.batch` rows of x there are, or may be."""
    rows = x if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()
    if around.onto is not None:
        around = around._replace(onto=around.onto.contiguous())
    blocks = -(-out.shape[1] // form.outputs) * batches * form.parts
    launcher, p = _launcher(form, blocks, form.shared_bytes(w.K), x.device, folder)
    fill(p, form, rows, w, out, batches, around)
    launcher(torch.cuda.current_stream(x.device).cuda_stream)


def fill(p: Parameters, form: Form, x: Tensor, w: DeviceInt, out: Tensor, batches: int, around: Around) -> int:
    """Sets what the kernel is told; how many blocks it takes."""
    p.weight, p.scale, p.zero, p.shift = map(_address, (w.words, w.scale, w.zero, w.shift))
    p.x, p.onto, p.out, p.order, p.starts = map(_address, (x, around.onto, out, around.order, around.starts))
    p.N, p.K, p.groups, p.T, p.stride = out.shape[1], w.K, w.scale.shape[1], len(x), 2 * x.stride(0)
    p.experts = 0 if around.starts is None else len(around.starts) - 1
    p.active, p.alpha = around.active, around.alpha
    p.threshold = around.gate.threshold if around.gate else 0.0
    return -(-out.shape[1] // form.outputs) * batches * form.parts


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
    return nvrtc.build("rows", source(form), form.options, device, SHARED_BYTES, folder, feature="a")
