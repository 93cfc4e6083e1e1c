"""Decode attention on Hopper: what the kernels in attention_decode_heads.cu and _grouped.cu are told."""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from torch import Tensor

from minicpm_cli.kernels.cache import LayerCache
from quant.kernels import nvrtc, targets
from quant.kernels.targets import SHARED_BYTES

FOLDER = Path(__file__).parent
COMMON = "attention_decode_ptx.cu", "attention_decode_common.cu"
HEADS, GROUPED = "attention_decode_heads.cu", "attention_decode_grouped.cu"
KINDS = {torch.float8_e4m3fn: 1, torch.int8: 2}
LOG2_E = math.log2(math.e)


class Parameters(ctypes.Structure):
    """`Params` of the kernel, field by field."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("k_scale", ctypes.c_void_p),
        ("v_scale", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("counters", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("splits", ctypes.c_int),
        ("q_stride", ctypes.c_int),
        ("row_stride", ctypes.c_int),
        ("scale_stride", ctypes.c_int),
        ("table_stride", ctypes.c_int),
        ("scale_log2", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """How the work is divided."""

    block: int = 1  # warps of a block with heads of their own, where each query head has its own key head
    cluster: int = 1  # blocks along one sequence, at most 8
    warps: int = 4
    depth: int = 2  # tokens of a thread in one step, there too
    stages: int = 4  # steps in the ring
    across: int = 1  # heads of a warp, there too


@dataclass(frozen=True, slots=True)
class Form:
    """What a kernel is compiled for."""

    width: int
    heads: int
    keys: int
    page: int
    kind: int
    half: bool  # float16, else bfloat16
    turn: int
    cut: Cut

    @property
    def options(self) -> tuple[str, ...]:
        names = ("D", "HEADS", "KEYS", "PAGE", "KIND", "FLOAT16", "TURN")
        cuts = ("BLOCK", "CLUSTER", "WARPS", "DEPTH", "STAGES", "ACROSS")  # in the order of Cut
        shape = self.width, self.heads, self.keys, self.page, self.kind, self.half, self.turn
        return tuple(f"-D{name}={int(n)}" for name, n in zip(names + cuts, shape + astuple(self.cut), strict=True))

    @property
    def source(self) -> str:
        return text(HEADS if self.heads == self.keys else GROUPED)

    @property
    def blocks(self) -> int:
        """Of one sequence."""
        group = self.heads // self.keys
        alone = self.heads // (self.cut.block * self.cut.across)
        return self.cut.cluster * (alone if group == 1 else self.keys * -(-group // 16))

    @property
    def shared_bytes(self) -> int:
        """As the kernels lay it out: a barrier, the warps' rings, the parts of the heads that come together here."""
        cut, part = self.cut, (self.width + 4) * 4
        pieces = self.width * (1 if self.kind else 2) // 16
        if self.heads == self.keys:
            side = 32 // (1 << (pieces - 1).bit_length())
            stage = cut.depth * 1024 + (side * cut.depth * 4 if self.kind else 0)
            return 16 + cut.warps * (cut.stages * stage + cut.cluster * cut.across * part)
        stage = (2 * -(-pieces // 4) + 4 * -(-pieces // 8)) * 512 + (64 if self.kind else 0)
        return 16 + cut.warps * (cut.stages * stage + 16 * part) + 8 * self.width


def text(kernel: str) -> str:
    """A kernel's source, with what it shares with the others before it."""
    return "".join((FOLDER / name).read_text() for name in (*COMMON, kernel))


def supported(q: Tensor, cache: LayerCache, turn: int = 0) -> bool:
    """Heads in 16-byte pieces, rotated parts too, in a 16-bit type or 8-bit codes, and values of their own."""
    if q.dtype not in (torch.bfloat16, torch.float16) or targets.unavailable(q.device) is not None:
        return False
    width, each = cache.k.shape[3], 16 if cache.k.dtype in KINDS else 8
    return (
        (cache.k.dtype == q.dtype or (cache.scales is not None and cache.scales.shape[1] % 2 == 0))
        and cache.rows.shape[1] == 2 * cache.k.shape[2]
        and width <= 128
        and not (width % each or turn % each or (width - 2 * turn) % each)
        and not any(t.data_ptr() % 16 for t in (q, cache.k, cache.v))
        and q.stride(0) % 8 == 0
    )


def worth(rows: int, heads: int, keys: int) -> bool:
    """Whether it is the faster form: for large groups only while few blocks are at work."""
    return heads <= 4 * keys or _tasks(rows, heads, keys) <= 32


def choose(rows: int, heads: int, keys: int, longest: int, narrow: bool) -> Cut:
    """The cut by the sizes, as measured on an H200: more blocks along a sequence where there are few sequences.

    `narrow`: a token's head takes less than 128 bytes, so that a warp takes two side by side. For 36 heads of 64 codes
    that is 53 us instead of 66 with 64 rows of 576 tokens, 209 instead of 260 with 256 of 640; not with a single row.
    """
    tasks = _tasks(rows, heads, keys)
    across = 2 if narrow and tasks > 72 and heads % 2 == 0 else 1
    if heads > keys:
        return Cut(cluster=8) if tasks <= 16 else Cut(cluster=2 if tasks <= 64 or longest > 8192 else 1, stages=2)
    if tasks <= 144:
        return Cut(cluster=8, depth=4, stages=3, across=across)
    if tasks <= 1152 or longest > 8192:
        return Cut(cluster=2, across=across)
    return Cut(across=across)


def narrow(cache: LayerCache) -> bool:
    return cache.scales is not None and cache.k.shape[3] < 128


def _tasks(rows: int, heads: int, keys: int) -> int:
    return rows * keys * -(-heads // keys // 16)


def decode(
    q: Tensor,  # [B, Hq, D]; with `turn` [B, Hq + 2 * Hkv, D], neither rotated nor stored
    cache: LayerCache,
    page_table: Tensor,  # [B, P] int32
    kv_len: Tensor,  # [B] int32
    scale: float,
    page_size: int,
    turn: tuple[Tensor, Tensor] | None = None,  # cos and sin [B, 1, R/2] float32
    cut: Cut | None = None,
    folder: Path | None = None,
    *,
    overlaps: bool = True,
    out: Tensor | None = None,
) -> Tensor:  # [B, Hq, D]
    """softmax(q k^T * scale) v over each row's kv_len tokens; with `turn` the newest is rotated and stored first.

    If it `overlaps` the launch before it, that must store no other tokens of these rows than the newest ones.
    """
    rows, (keys, width) = len(q), cache.k.shape[2:]
    heads = q.shape[1] - (2 * keys if turn else 0)
    out = q.new_empty(rows, heads, width) if out is None else out
    cut = cut or choose(rows, heads, keys, page_table.shape[1] * page_size, narrow(cache))
    kind, half = KINDS.get(cache.k.dtype, 0), turn[0].shape[-1] if turn else 0
    form = Form(width, heads, keys, page_size, kind, q.dtype == torch.float16, half, cut)
    launcher, p = _launcher(form, rows, q.device, folder, overlaps)
    p.q, p.k, p.v, p.out = q.data_ptr(), cache.k.data_ptr(), cache.v.data_ptr(), out.data_ptr()
    p.table, p.lengths = page_table.data_ptr(), kv_len.data_ptr()
    p.q_stride, p.row_stride, p.table_stride = q.stride(0), cache.k.stride(1), page_table.stride(0)
    p.scale_log2 = scale * LOG2_E
    if cache.k_scale is not None and cache.v_scale is not None:
        p.k_scale, p.v_scale = cache.k_scale.data_ptr(), cache.v_scale.data_ptr()
        p.scale_stride = cache.k_scale.stride(0)
    if turn:
        p.cos, p.sin = turn[0].data_ptr(), turn[1].data_ptr()
    launcher(torch.cuda.current_stream(q.device).cuda_stream)
    return out


@functools.cache
def _launcher(
    form: Form, rows: int, device: torch.device, folder: Path | None, overlaps: bool
) -> tuple[nvrtc.Launcher, Parameters]:
    parameters, blocks, threads = Parameters(), rows * form.blocks, 32 * form.cut.warps
    compiled = kernel(form, device, folder)
    return compiled.launcher(blocks, threads, form.shared_bytes, parameters, overlaps=overlaps), parameters


@functools.cache
def kernel(form: Form, device: torch.device, folder: Path | None) -> nvrtc.Kernel:
    """Compiled or read from `folder` once a process and device."""
    return nvrtc.build("attention_decode", form.source, form.options, device, SHARED_BYTES, folder)
