"""Decode attention on Hopper with a key head for each query head: what the kernel in attention_decode.cu is told."""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from torch import Tensor

from minicpm_cli.kernels.cache import LayerCache
from quant.kernels import nvrtc

SOURCE = Path(__file__).with_name("attention_decode.cu")
KINDS = {torch.float8_e4m3fn: 1, torch.int8: 2}
SHARED_BYTES = 227 << 10  # that a block may have on Hopper
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
        ("q_stride", ctypes.c_int),
        ("row_stride", ctypes.c_int),
        ("scale_stride", ctypes.c_int),
        ("table_stride", ctypes.c_int),
        ("scale_log2", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """How the work is divided."""

    block: int = 1  # heads of a block
    cluster: int = 1  # blocks along one sequence, at most 8
    warps: int = 4
    depth: int = 2  # tokens of a thread in one step
    stages: int = 4  # steps in the ring


@dataclass(frozen=True, slots=True)
class Form:
    """What the kernel is compiled for."""

    width: int
    heads: int
    page: int
    kind: int
    half: bool  # float16, else bfloat16
    turn: int
    cut: Cut

    @property
    def options(self) -> tuple[str, ...]:
        names = ("D", "HEADS", "PAGE", "KIND", "FLOAT16", "TURN", "BLOCK", "CLUSTER", "WARPS", "DEPTH", "STAGES")
        values = self.width, self.heads, self.page, self.kind, self.half, self.turn, *astuple(self.cut)
        return tuple(f"-D{name}={int(value)}" for name, value in zip(names, values, strict=True))

    @property
    def shared_bytes(self) -> int:
        each = 16 if self.kind else 8
        side = 32 // (1 << (-(-self.width // each) - 1).bit_length())
        coded = side * self.cut.depth * 8 if self.kind else 0
        ring = self.cut.stages * (self.cut.depth * 1024 + coded)
        return 16 + self.cut.warps * (ring + self.cut.cluster * (self.width + 4) * 4)


@functools.cache
def unavailable(device: torch.device) -> str | None:
    """Why the kernel cannot run on this device; None where it can."""
    return "it is not a CUDA device" if device.type != "cuda" else nvrtc.unavailable()


def supported(q: Tensor, cache: LayerCache, turn: int = 0) -> bool:
    """Heads in 16-byte pieces, rotated parts too, in a 16-bit type or 8-bit codes."""
    if q.dtype not in (torch.bfloat16, torch.float16) or unavailable(q.device) is not None:
        return False
    width = cache.k.shape[3]
    each = 16 if cache.k.dtype in KINDS else 8
    return (
        (cache.k.dtype == q.dtype or cache.scales is not None)
        and cache.rows.shape[1] == 2 * cache.k.shape[2]
        and width <= 256
        and not (width % each or turn % each or (width - 2 * turn) % each)
        and not any(t.data_ptr() % 16 for t in (q, cache.k, cache.v))
        and q.stride(0) % 8 == 0
    )


def choose(rows: int, heads: int, longest: int) -> Cut:
    """The cut by the sizes, as measured on an H200."""
    cluster = min(8, max(1, 512 // (rows * heads)))
    cluster = 1 << (cluster.bit_length() - 1)
    return Cut(cluster=max(cluster, 2 if longest > 8192 else 1))


def decode(
    q: Tensor,  # [B, Hq, D]; with `turn` [B, 3 * Hq, D], neither rotated nor stored
    cache: LayerCache,
    page_table: Tensor,  # [B, P] int32
    kv_len: Tensor,  # [B] int32
    scale: float,
    page_size: int,
    turn: tuple[Tensor, Tensor] | None = None,  # cos and sin [B, 1, R/2] float32
    cut: Cut | None = None,
    folder: Path | None = None,
) -> Tensor:  # [B, Hq, D]
    """softmax(q k^T * scale) v over each row's kv_len tokens; with `turn` the newest is rotated and stored first."""
    rows, (heads, width) = len(q), cache.k.shape[2:]
    out = q.new_empty(rows, heads, width)
    cut = cut or choose(rows, heads, page_table.shape[1] * page_size)
    kind = KINDS.get(cache.k.dtype, 0)
    half = turn[0].shape[-1] if turn else 0
    form = Form(width, heads, page_size, kind, q.dtype == torch.float16, half, cut)
    launcher, p = _launcher(form, rows * heads // cut.block * cut.cluster, q.device, folder)
    p.q, p.k, p.v, p.out = q.data_ptr(), cache.k.data_ptr(), cache.v.data_ptr(), out.data_ptr()
    p.table, p.lengths = page_table.data_ptr(), kv_len.data_ptr()
    p.q_stride, p.row_stride, p.table_stride = q.stride(0), cache.k.stride(1), page_table.stride(0)
    p.scale_log2 = scale * LOG2_E
    if cache.k_scale is not None and cache.v_scale is not None:
        p.k_scale, p.v_scale = cache.k_scale.data_ptr(), cache.v_scale.data_ptr()
        p.scale_stride = cache.k_scale.stride(1)
    if turn:
        p.cos, p.sin = turn[0].data_ptr(), turn[1].data_ptr()
    launcher(torch.cuda.current_stream(q.device).cuda_stream)
    return out


@functools.cache
def _launcher(form: Form, blocks: int, device: torch.device, folder: Path | None) -> tuple[nvrtc.Launcher, Parameters]:
    parameters = Parameters()
    threads = 32 * form.cut.warps
    return kernel(form, device, folder).launcher(blocks, threads, form.shared_bytes, parameters), parameters


@functools.cache
def kernel(form: Form, device: torch.device, folder: Path | None) -> nvrtc.Kernel:
    """Compiled or read from `folder` once a process and device."""
    major, minor = torch.cuda.get_device_capability(device)
    with torch.cuda.device(device):
        cubin = nvrtc.cached_cubin(SOURCE.read_text(), form.options, f"sm_{major}{minor}", folder)
        return nvrtc.load(cubin, "attention_decode", SHARED_BYTES)
