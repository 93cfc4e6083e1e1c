"""Products of 1 to 8 rows with plain or group-wise weights on CUDA: what the kernel of gemv.cu is told."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from quant.kernels import nvrtc
from quant.kernels.forms import definitions, kind_of
from quant.kernels.layout import DeviceInt
from quant.kernels.targets import SHARED_BYTES
from quant.layers.around import Gate, Norm

FOLDER = Path(__file__).parent
MOST_ROWS = 8
TILE = 8  # rows of W in one pass
GATES = {"silu": 1, "relu": 2}
PROCESSORS = 132  # of an H200; another number changes the speed only
FEWEST_WARPS, MOST_WARPS = 5, 12
MOST_BLOCK_ROWS = 128
HEAD_ROWS = 1 << 16
LONG_ROW = 4096
ALIGNMENT = 16  # bytes of an access
BLOCK_BYTES = 160 << 10  # that it is given before its share of the outputs is halved


class Parameters(ctypes.Structure):
    """`Params` of the kernel, field by field."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
        ("shift", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("onto", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("N", ctypes.c_int),
        ("K", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("T", ctypes.c_int),
        ("least_rows", ctypes.c_int),
        ("longer_blocks", ctypes.c_int),
        ("column_warps", ctypes.c_int),
        ("row_warps", ctypes.c_int),
        ("stages", ctypes.c_int),
        ("gate", ctypes.c_int),
        ("wide", ctypes.c_int),
        ("group_inverse", ctypes.c_uint32),
        ("eps", ctypes.c_float),
        ("alpha", ctypes.c_float),
        ("threshold", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class Form:
    """What the kernel is compiled for."""

    bits: int  # 4, 8, or 16 for plain weights
    half: bool  # float16, else bfloat16
    scale: int = 0
    kind: int = 0  # 0: every zero point is the middle; 1: zero points; 2: shifts
    run: int = 4  # words of a row under one scale, as the kernel reads them
    blocks: int = 1  # of rows of x: 1, 2, or for packed weights 4
    depth: int = 3  # items requested ahead

    def for_rows(self, rows: int) -> Form:
        """The form that multiplies by `rows` rows of x."""
        return replace(self, blocks=1 << (-(-rows // self.block_rows) - 1).bit_length())

    @property
    def block_rows(self) -> int:
        return 4 if self.bits == 16 else 2

    @property
    def source(self) -> str:
        parts = ("gemv_plain.cu",) if self.bits == 16 else ("gemv_packed.cu", "gemv_main.cu")
        return "\n".join((FOLDER / part).read_text() for part in ("gemv.cu", *parts))

    @property
    def step(self) -> int:
        """Columns of an item."""
        return 256 if self.bits == 4 else 128

    @property
    def item_bytes(self) -> int:
        return 4096 if self.bits == 16 else 2048

    @property
    def value_bytes(self) -> tuple[int, ...]:
        """Of a scale and of what goes with it."""
        return () if self.bits == 16 else (4 if self.scale == 2 else 2, *((), (1,), (4,))[self.kind])

    @property
    def options(self) -> tuple[str, ...]:
        return definitions("BITS HALF SCALE KIND RUN NB DEPTH", astuple(self))


@dataclass(frozen=True, slots=True)
class Launch:
    """How a product is spread: over blocks, each with its share of the outputs, their warps along columns and rows."""

    form: Form
    outputs: int
    k: int
    groups: int
    gated: bool
    blocks: int
    column_warps: int
    row_warps: int = 1

    @property
    def threads(self) -> int:
        return 32 * self.column_warps * self.row_warps

    @property
    def tiles(self) -> int:
        """Pairs of 8 rows of W in the largest block."""
        return -(-self.outputs // self.blocks // (TILE if self.gated else 2 * TILE))

    @property
    def stages(self) -> int:
        """Items of a warp that are in shared memory at once."""
        steps = -(-self.k // self.form.step)
        return min(-(-steps // self.column_warps) * -(-self.tiles // self.row_warps), self.form.depth)

    @property
    def shared_bytes(self) -> int:
        ring = self.column_warps * self.row_warps * self.stages * self.form.item_bytes
        values, halves = self.tiles * (TILE if self.gated else 2 * TILE) * self.groups, 2 if self.gated else 1
        tables = sum(halves * (-(-values * size // 16) * 16 + 16) for size in self.form.value_bytes)
        return ring + self._prepared + tables + self.column_warps * self.form.blocks * (self.tiles * 256 + 32)

    @property
    def _prepared(self) -> int:
        """Packed weights: x as bytes, and a scale for every row and chunk of 64 or 128 columns."""
        rows = self.form.blocks * self.form.block_rows
        return 0 if self.form.bits == 16 else self.threads // 32 * rows * 2 * (self.form.step + 4)


def choose(form: Form, n: int, k: int, groups: int, gated: bool) -> Launch:
    """As measured on an H200 with MiniCPM-2B's shapes in 4 and 16 bits, a chain of 161 products in one graph.

    Equal shares of the outputs over the multiprocessors; a head's blocks, and those of plain weights with short rows,
    take turns. The warps share out the columns in as few rounds as 12 of them can, a packed head's in two.
    """
    steps, outputs, head = -(-k // form.step), n // 2 if gated else n, n > HEAD_ROWS and not gated
    column_warps = min(range(1, min(steps, MOST_WARPS) + 1), key=lambda c: (-(-steps // c), c))
    blocks = max(-(-n // MOST_BLOCK_ROWS), min(outputs, PROCESSORS))
    if form.bits != 16 and head:
        column_warps = min(MOST_WARPS, -(-steps // 2))
    if form.bits == 16 and not gated and (head or k <= LONG_ROW):
        blocks = -(-n // (32 if n >= 32 * PROCESSORS else 16))
    launch = Launch(form, outputs, k, groups, gated, blocks, column_warps, max(1, FEWEST_WARPS // column_warps))
    while 4 * launch.blocks < outputs and launch.shared_bytes > BLOCK_BYTES:
        launch = replace(launch, blocks=min(outputs, 2 * launch.blocks))
    return launch


def form_of(weight: Tensor | DeviceInt, dtype: torch.dtype) -> Form:
    if isinstance(weight, Tensor):
        return Form(16, dtype == torch.float16)
    return Form(*kind_of(weight, dtype), _run(weight.bits, weight.group))


def _run(bits: int, group: int) -> int:
    """4 where whole chunks share a scale; 4 bits: words of 32 columns in a chunk of 128; 8 bits: of 16 in 64."""
    if bits == 8:
        return 4 if group % 64 == 0 else 2
    return 4 if group % 128 == 0 else 2 if group % 64 == 0 else 1


def parameters(weight: Tensor | DeviceInt, launch: Launch) -> Parameters:
    """All that does not change from call to call."""
    p = Parameters(K=launch.k, groups=launch.groups, stages=launch.stages)
    p.column_warps, p.row_warps = launch.column_warps, launch.row_warps
    p.least_rows, p.longer_blocks = divmod(launch.outputs, launch.blocks)
    if isinstance(weight, Tensor):
        p.weight, p.N = weight.data_ptr(), weight.shape[0]
        return p
    p.weight, p.scale, p.N = weight.words.data_ptr(), weight.scale.data_ptr(), weight.N
    p.group_inverse = -(-(2**32) // weight.group)
    p.zero = None if weight.zero is None else weight.zero.data_ptr()
    p.shift = None if weight.shift is None else weight.shift.data_ptr()
    return p


def set_call(
    p: Parameters, x: Tensor, out: Tensor, norm: Norm | None, gate: Gate | None, onto: Tensor | None, alpha: float
) -> None:
    """What changes from call to call."""
    p.x, p.out, p.T, p.alpha, p.wide = x.data_ptr(), out.data_ptr(), x.shape[0], alpha, out.dtype == torch.float32
    p.norm, p.eps = (norm.weight.data_ptr(), norm.eps) if norm else (None, 0.0)
    p.gate, p.threshold = (GATES[gate.kind], gate.threshold) if gate else (0, 0.0)
    p.onto = None if onto is None else onto.data_ptr()


def supported(weight: Tensor | DeviceInt, dtype: torch.dtype) -> bool:
    """Whether the kernel multiplies by these weights: rows of whole 16-byte pieces, groups of whole words."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    if isinstance(weight, Tensor):
        rows_fit = weight.shape[1] % (ALIGNMENT // 2) == 0 and weight.is_contiguous()
        return weight.dtype == dtype and rows_fit and weight.data_ptr() % ALIGNMENT == 0
    tensors = (t for t in (weight.words, weight.scale, weight.zero, weight.shift) if t is not None)
    aligned = all(t.data_ptr() % ALIGNMENT == 0 and t.is_contiguous() for t in tensors)
    return weight.K % 32 == 0 and weight.group % 32 == 0 and aligned


def straight(x: Tensor) -> Tensor:
    """`x` as 16-byte accesses need it; one row of some columns is contiguous wherever it begins."""
    fits = x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


class Gemv:
    """The products of one matrix with 1 to 8 rows, compiled when it is made."""

    def __init__(self, weight: Tensor | DeviceInt, dtype: torch.dtype, folder: Path | None = None) -> None:
        self.weight, self.form = weight, form_of(weight, dtype)  # the launches hold only its address
        self.N, self.K = weight.shape if isinstance(weight, Tensor) else (weight.N, weight.K)
        self.groups = 1 if isinstance(weight, Tensor) else weight.scale.shape[1]
        self.folder = folder
        self.device = weight.device if isinstance(weight, Tensor) else weight.words.device
        self.launchers: dict[tuple[int, bool], tuple[nvrtc.Launcher, Parameters]] = {}
        for rows in range(1, MOST_ROWS + 1):
            self._kernel(self.form.for_rows(rows))

    def __call__(
        self,
        x: Tensor,  # [T, K]
        norm: Norm | None = None,
        gate: Gate | None = None,
        onto: Tensor | None = None,  # [T, N], or N/2 behind a gate
        alpha: float = 1.0,
        *,
        float32_out: bool = False,
    ) -> Tensor:
        """onto + alpha * gate(W @ norm(x)), summed in float32 and rounded once to x's type, or not at all."""
        outputs = self.N // 2 if gate else self.N
        out = x.new_empty(x.shape[0], outputs, dtype=torch.float32 if float32_out else x.dtype)
        launcher, changing = self._launcher(self.form.for_rows(x.shape[0]), gate is not None)
        inputs, base = straight(x), None if onto is None else straight(onto)
        set_call(changing, inputs, out, norm, gate, base, alpha)
        launcher(torch.cuda.current_stream(self.device).cuda_stream)
        return out

    def _launcher(self, form: Form, gated: bool) -> tuple[nvrtc.Launcher, Parameters]:
        key = form.blocks, gated
        if key not in self.launchers:
            launch = choose(form, self.N, self.K, self.groups, gated)
            fixed = parameters(self.weight, launch)
            prepared = self._kernel(form).launcher(launch.blocks, launch.threads, launch.shared_bytes, fixed)
            self.launchers[key] = prepared, fixed
        return self.launchers[key]

    def _kernel(self, form: Form) -> nvrtc.Kernel:
        return kernel(form, self.device, self.folder)


@functools.cache
def kernel(form: Form, device: torch.device, folder: Path | None) -> nvrtc.Kernel:
    """Compiled or read from `folder` once a process and device."""
    return nvrtc.build("gemv", form.source, form.options, device, SHARED_BYTES, folder)
