"""Products of a batch of rows on Hopper, by the copy engine: what the kernel in rows_bulk.cu is told."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from quant.kernels import nvrtc, rows_cuda, trial
from quant.kernels.copy_engine import MAP_BYTES, SWIZZLE_64, SWIZZLE_128, Map, encoded
from quant.kernels.forms import definitions, kind_of
from quant.kernels.layout import DeviceInt
from quant.kernels.rows_cuda import PROCESSORS, run_of
from quant.kernels.targets import SHARED_BYTES

SOURCE = Path(__file__).with_name("rows_bulk.cu")
BARRIER_BYTES = 128
MOST_PARTS = 8  # blocks of a cluster
BATCHES = (16, 32, 64, 96, 128)  # rows of x in a block


class Ring(NamedTuple):
    """What goes well with a kind of weights and a number of rows."""

    warp_groups: int
    depth: int
    chunks: int
    blocks: int  # that a product is cut into, by its columns where there are fewer


# By bits and rows: for products of up to PROCESSORS tiles of 64 outputs, and for those of more. As measured on an H200
# with MiniCPM-2B's products (N of 2304, 6912; 11520), a chain of 160: plain at 32 rows 1.55 ms where cuBLAS takes 1.79,
# in 4 bits at 64 rows 1.73 and at 128 rows 2.14 ms, where unpacking takes 1.65 before cuBLAS begins (both before the
# scales' loads went out together).
RINGS = {
    (16, 16): (Ring(1, 8, 2, 108), Ring(2, 5, 2, 90)),
    (16, 32): (Ring(1, 8, 2, 108), Ring(2, 5, 2, 90)),
    (16, 64): (Ring(1, 6, 2, 108), Ring(2, 4, 2, 90)),
    (16, 96): (Ring(2, 7, 1, 81), Ring(2, 7, 1, 81)),
    (16, 128): (Ring(2, 6, 1, 81), Ring(2, 6, 1, 81)),
    (4, 16): (Ring(1, 8, 1, 324), Ring(1, 8, 1, 360)),
    (4, 32): (Ring(1, 8, 1, 216), Ring(1, 8, 1, 216)),
    (4, 64): (Ring(1, 5, 1, 216), Ring(1, 5, 1, 216)),
    (4, 96): (Ring(2, 6, 1, 81), Ring(2, 6, 1, 81)),
    (4, 128): (Ring(2, 5, 1, 81), Ring(2, 5, 1, 81)),
    (8, 16): (Ring(1, 8, 1, 324), Ring(1, 8, 1, 324)),
    (8, 32): (Ring(1, 8, 1, 216), Ring(1, 8, 1, 216)),
    (8, 64): (Ring(2, 3, 1, 216), Ring(2, 3, 1, 360)),
    (8, 96): (Ring(2, 4, 1, 81), Ring(2, 4, 1, 81)),
    (8, 128): (Ring(2, 4, 1, 81), Ring(2, 4, 1, 81)),
}
MOST_OUTPUTS = 4096  # of plain weights at 64 rows
MANY_OUTPUTS = 128 * PROCESSORS  # of plain weights at 32: a block for each processor


class Parameters(ctypes.Structure):
    """`Params` of the kernel, field by field."""

    _fields_ = (
        ("w", ctypes.c_ubyte * MAP_BYTES),
        ("x", ctypes.c_ubyte * MAP_BYTES),
        ("scale", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
        ("shift", ctypes.c_void_p),
        ("onto", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("N", ctypes.c_int),
        ("K", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("T", ctypes.c_int),
        ("alpha", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class Form:
    """What the kernel is compiled for."""

    bits: int  # 16: plain weights
    half: bool  # float16, else bfloat16
    scale: int
    kind: int  # 0: every zero point is the middle; 1: zero points; 2: shifts
    run: int  # columns under one scale, in units of 32
    batch: int  # rows of x in a block, a multiple of 8
    warp_groups: int  # of 64 rows of W each in a block
    parts: int  # of the columns, a block each: a cluster of at most 8
    depth: int  # stages of the ring
    chunks: int = 1  # of 64 columns of plain weights in a stage

    @property
    def options(self) -> tuple[str, ...]:
        return definitions("BITS HALF SCALE KIND RUN NT WG PARTS DEPTH CHUNKS GATE", (*astuple(self), 0))

    @property
    def rows(self) -> int:
        return 64 * self.warp_groups

    @property
    def stage(self) -> int:  # columns
        return 64 * self.chunks if self.bits == 16 else 128

    @property
    def threads(self) -> int:
        return 128 * self.warp_groups + 32

    def blocks(self, n: int, t: int) -> int:
        """For `n` rows of W and `t` of x."""
        return -(-n // self.rows) * -(-t // self.batch) * self.parts

    def shared_bytes(self, k: int) -> int:
        ring = self.depth * self.stage * (self.batch * 2 + self.rows * self.bits // 8)
        sums = self.batch * (self.rows + 4) * 4
        stages = math.ceil(math.ceil(k / self.stage) / self.parts)
        groups = 0 if self.bits == 16 else stages * self.stage // (32 * self.run) + 2  # at most, wherever a part begins
        return 1024 + max(ring, sums) + BARRIER_BYTES + groups * self.rows * 4 * (self.kind + 1)


def supported(weight: Tensor | DeviceInt, dtype: torch.dtype) -> bool:
    """Rows of whole 16-byte pieces on 16-byte boundaries, groups of whole 32 columns or of a whole row."""
    if isinstance(weight, DeviceInt):
        return rows_cuda.fits(weight, dtype) and rows_cuda.missing(weight.words.device) is None
    fits = weight.shape[1] % 8 == 0 and weight.is_contiguous() and weight.data_ptr() % 16 == 0
    halves = weight.dtype == dtype and dtype in (torch.bfloat16, torch.float16)
    return fits and halves and rows_cuda.missing(weight.device) is None


@functools.cache
def disagreement(form: Form, device: torch.device, folder: Path | None = None) -> str | None:
    """Why a form cannot be trusted on a device, after a small product in it; None where it can."""
    dtype, n, k = torch.float16 if form.half else torch.bfloat16, form.rows + 24, form.stage * (form.parts + 1)
    return trial.disagreement(
        lambda x, weight, onto: product(x, weight, onto, 0.5, folder=folder, form=form),
        lambda: trial.weight(form.bits, form.scale, form.kind, form.run, dtype, n, k, device),
        form.batch - 3,
        dtype,
        device,
    )


def form_of(
    weight: Tensor | DeviceInt,
    dtype: torch.dtype,
    batch: int,
    warp_groups: int,
    parts: int = 1,
    depth: int = 4,
    chunks: int = 1,
) -> Form:
    shape = batch, warp_groups, parts, depth, chunks
    if isinstance(weight, Tensor):
        return Form(16, dtype == torch.float16, 0, 0, 1, *shape)
    return Form(*kind_of(weight, dtype), run_of(weight), *shape)


def most_rows(weight: Tensor) -> int:
    """Up to which plain weights are multiplied faster than by cuBLAS.

    Of MiniCPM-2B on an H200, us at 64 rows (at 16), and cuBLAS's: o 6.4 (5.2), 7.1 (6.9); down 10.8 (9.4), 12.3 (11.6);
    qkv 11.5 (10.1), 11.4 (11.2); gate and up 17.5 (16.4), 16.3 (16.8).
    """
    return 64 if weight.shape[0] <= MOST_OUTPUTS else 32 if weight.shape[0] <= MANY_OUTPUTS else 0


def choose(rows: int, weight: Tensor | DeviceInt, dtype: torch.dtype) -> Form:
    """The form by the sizes, as measured on an H200."""
    n, k = weight.shape if isinstance(weight, Tensor) else (weight.N, weight.K)
    bits = 16 if isinstance(weight, Tensor) else weight.bits
    batch = next((b for b in BATCHES if b >= rows), BATCHES[-1])
    ring = RINGS[bits, batch][n > 64 * PROCESSORS]
    if n % 8 or k % 64:  # boxes of chunks reach no further than whole ones
        ring = ring._replace(depth=min(8, ring.depth * ring.chunks), chunks=1)
    form = form_of(weight, dtype, batch, ring.warp_groups, 1, ring.depth, ring.chunks)
    most = min(MOST_PARTS, -(-k // form.stage))
    parts = max(1, min(most, round(ring.blocks / form.blocks(n, rows))))
    forms = (replace(form, parts=p, depth=d) for p in range(parts, most + 1) for d in range(ring.depth, 1, -1))
    return next(f for f in forms if f.shared_bytes(k) <= SHARED_BYTES)


class Product:
    """One matrix times batches of rows, for each number of rows by a launch that is prepared once."""

    def __init__(self, weight: Tensor | DeviceInt, dtype: torch.dtype, folder: Path | None = None) -> None:
        self.weight, self.dtype, self.folder = weight, dtype, folder  # the launches hold only its addresses
        self.N, self.K = weight.shape if isinstance(weight, Tensor) else (weight.N, weight.K)
        self.device = weight.device if isinstance(weight, Tensor) else weight.words.device
        self._launches: dict[int, tuple[Form, nvrtc.Launcher, Parameters] | None] = {}

    def __call__(
        self,
        x: Tensor,  # [T, K]
        onto: Tensor | None = None,  # [T, N]
        alpha: float = 1.0,
        out: Tensor | None = None,  # [T, N], may be `onto`; taken if it is contiguous
    ) -> Tensor:  # [T, N]
        """onto + alpha * x @ W^T, weights rounded to x's type, sums in float32; the same bits at every call."""
        rows = x if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()
        onto = None if onto is None else onto.contiguous()
        if out is None or not out.is_contiguous():
            out = x.new_empty(len(x), self.N)
        launch = self._launch(len(x))
        assert launch is not None, "a form that failed its trial: see `ready`"
        form, launcher, p = launch
        set_call(p, form, rows, out, onto, alpha, encoded)
        launcher(torch.cuda.current_stream(self.device).cuda_stream)
        return out

    def ready(self, rows: int) -> bool:
        """Whether the form for so many rows can be trusted here; it is compiled and tried once a process."""
        return self._launch(rows) is not None

    def _launch(self, rows: int) -> tuple[Form, nvrtc.Launcher, Parameters] | None:
        if rows not in self._launches:
            form = choose(rows, self.weight, self.dtype)
            refused = disagreement(form, self.device, self.folder)
            self._launches[rows] = None if refused else self.prepare(rows, form)
        return self._launches[rows]

    def prepare(self, rows: int, form: Form) -> tuple[Form, nvrtc.Launcher, Parameters]:
        p = parameters(form, self.weight, encoded)
        made = kernel(form, self.device, self.folder)
        blocks, shared_bytes = form.blocks(self.N, rows), form.shared_bytes(self.K)
        return form, made.launcher(blocks, form.threads, shared_bytes, p), p


def product(
    x: Tensor,  # [T, K]
    weight: Tensor | DeviceInt,  # [N, K]
    onto: Tensor | None = None,  # [T, N]
    alpha: float = 1.0,
    out: Tensor | None = None,  # [T, N], may be `onto`
    folder: Path | None = None,
    *,
    form: Form,
) -> Tensor:  # [T, N]
    """Once, in a given form."""
    made = Product(weight, x.dtype, folder)
    made._launches[len(x)] = made.prepare(len(x), form)
    return made(x, onto, alpha, out)


def parameters(form: Form, weight: Tensor | DeviceInt, encode: Callable[[Map], bytes]) -> Parameters:
    """What is the same at every call."""
    p = Parameters()
    ctypes.memmove(p.w, encode(weight_map(weight, form)), MAP_BYTES)
    if isinstance(weight, Tensor):
        p.N, p.K = weight.shape
        return p
    p.N, p.K, p.groups, p.scale = weight.N, weight.K, weight.scale.shape[1], weight.scale.data_ptr()
    p.zero = None if weight.zero is None else weight.zero.data_ptr()
    p.shift = None if weight.shift is None else weight.shift.data_ptr()
    return p


def set_call(
    p: Parameters, form: Form, x: Tensor, out: Tensor, onto: Tensor | None, alpha: float, encode: Callable[[Map], bytes]
) -> None:
    """What changes from call to call."""
    p.T, p.alpha, p.out = len(x), alpha, out.data_ptr()
    p.onto = None if onto is None else onto.data_ptr()
    x_map = Map(x.data_ptr(), (x.shape[1], len(x)), (2 * x.stride(0),), (64, form.batch), 2, SWIZZLE_128)
    ctypes.memmove(p.x, encode(x_map), MAP_BYTES)


def weight_map(weight: Tensor | DeviceInt, form: Form) -> Map:
    if isinstance(weight, DeviceInt):
        words, swizzle = weight.words, SWIZZLE_64 if weight.bits == 4 else SWIZZLE_128
        words_box = form.stage * weight.bits // 32, form.rows
        return Map(words.data_ptr(), (words.shape[1], weight.N), (4 * words.shape[1],), words_box, 4, swizzle)
    n, k = weight.shape
    if form.chunks == 1:
        return Map(weight.data_ptr(), (k, n), (2 * k,), (64, form.rows), 2, SWIZZLE_128)
    box = 64, 8, form.chunks, form.rows // 8
    return Map(weight.data_ptr(), (64, 8, k // 64, n // 8), (2 * k, 128, 16 * k), box, 2, SWIZZLE_128)


@functools.cache
def kernel(form: Form, device: torch.device, folder: Path | None) -> nvrtc.Kernel:
    """Compiled or read from `folder` once a process and device."""
    source = rows_cuda.text(form.batch, form.half, SOURCE)
    return nvrtc.build("rows", source, form.options, device, SHARED_BYTES, folder, feature="a")
