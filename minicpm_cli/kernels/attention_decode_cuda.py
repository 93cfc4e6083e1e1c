"""Decode attention on Hopper: which kernel in CUDA C++ a launch takes, and what it is told."""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path

import torch
from torch import Tensor

from minicpm_cli.kernels.attention_decode_form import PROCESSORS, Cut, Shape, Stream, streamed
from minicpm_cli.kernels.cache import LayerCache
from quant.kernels import nvrtc, targets
from quant.kernels.targets import SHARED_BYTES

FOLDER = Path(__file__).parent
COMMON = "attention_decode_ptx.cu", "attention_decode_common.cu"
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
        ("usual", ctypes.c_int),
        ("splits", ctypes.c_int),
        ("q_stride", ctypes.c_int),
        ("row_stride", ctypes.c_int),
        ("scale_stride", ctypes.c_int),
        ("table_stride", ctypes.c_int),
        ("scale_log2", ctypes.c_float),
    )


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
        and cache.rows.is_contiguous()
        and (cache.scales is None or cache.scales.transpose(1, 2).is_contiguous())
        and width <= 128
        and not (width % each or turn % each or (width - 2 * turn) % each)
        and not any(t.data_ptr() % 16 for t in (q, cache.k, cache.v))
        and q.stride(0) % 8 == 0
    )


def shape_of(q: Tensor, cache: LayerCache, heads: int, page_size: int, turn: int) -> Shape:
    keys, width = cache.k.shape[2:]
    return Shape(width, heads, keys, page_size, KINDS.get(cache.k.dtype, 0), q.dtype == torch.float16, turn)


def worth(rows: int, heads: int, keys: int) -> bool:
    """Whether it is the faster form: for large groups only while few blocks are at work."""
    return heads <= 4 * keys or _tasks(rows, heads, keys) <= 32


def choose(rows: int, shape: Shape, longest: int, processors: int = PROCESSORS) -> Cut | Stream:
    """The cut by the sizes, as measured on an H200: more blocks along a sequence where there are few sequences.

    With 36 heads of 64 and from 16 sequences on blocks stream whole tokens: of 256 sequences of 540 codes in 151 us
    instead of 181, of 64 of 545 in bfloat16 in 75 instead of 88. Else a warp takes two heads of codes side by side,
    each less than 128 bytes; not with a single sequence.
    """
    heads, keys, tasks = shape.heads, shape.keys, _tasks(rows, shape.heads, shape.keys)
    if heads > keys:
        return Cut(cluster=8) if tasks <= 16 else Cut(cluster=2 if tasks <= 64 or longest > 8192 else 1, stages=2)
    stream = streamed(rows, shape, longest, processors)
    if tasks >= 576 and stream:
        return stream
    across = 2 if shape.kind and shape.width < 128 and tasks > 72 and heads % 2 == 0 else 1
    if tasks <= 144:
        return Cut(cluster=8, depth=4, stages=3, across=across)
    if tasks <= 1152 or longest > 8192:
        return Cut(cluster=2, across=across)
    return Cut(across=across)


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
    cut: Cut | Stream | None = None,
    folder: Path | None = None,
    *,
    overlaps: bool = True,
    out: Tensor | None = None,
    counters: Tensor | None = None,  # [1 + B] int32 for a Stream, which finds and leaves zeros
) -> Tensor:  # [B, Hq, D]
    """softmax(q k^T * scale) v over each row's kv_len tokens; with `turn` the newest is rotated and stored first.

    If it `overlaps` the launch before it, that must store no other tokens of these rows than the newest ones.
    """
    rows, (keys, width) = len(q), cache.k.shape[2:]
    heads = q.shape[1] - (2 * keys if turn else 0)
    out = q.new_empty(rows, heads, width) if out is None else out
    shape = shape_of(q, cache, heads, page_size, turn[0].shape[-1] if turn else 0)
    cut = cut or choose(rows, shape, page_table.shape[1] * page_size)
    launcher, p = _launcher(shape, cut, rows, q.device, folder, overlaps)
    if isinstance(cut, Stream):
        assert counters is not None
        parts = q.new_empty(cut.parts(shape, rows), dtype=torch.float32)
        share(p, cut, rows, parts, counters)
    fill(p, q, cache, page_table, kv_len, scale, turn, out)
    launcher(torch.cuda.current_stream(q.device).cuda_stream)
    return out


def fill(
    p: Parameters,
    q: Tensor,
    cache: LayerCache,
    page_table: Tensor,
    kv_len: Tensor,
    scale: float,
    turn: tuple[Tensor, Tensor] | None,
    out: Tensor,
) -> None:
    p.q, p.k, p.v, p.out = q.data_ptr(), cache.k.data_ptr(), cache.v.data_ptr(), out.data_ptr()
    p.table, p.lengths = page_table.data_ptr(), kv_len.data_ptr()
    p.q_stride, p.row_stride, p.table_stride = q.stride(0), cache.k.stride(1), page_table.stride(0)
    p.scale_log2 = scale * LOG2_E
    if cache.k_scale is not None and cache.v_scale is not None:
        p.k_scale, p.v_scale = cache.k_scale.data_ptr(), cache.v_scale.data_ptr()
        p.scale_stride = cache.k_scale.stride(0)
    if turn:
        p.cos, p.sin = turn[0].data_ptr(), turn[1].data_ptr()


def share(p: Parameters, cut: Stream, rows: int, parts: Tensor, counters: Tensor) -> None:
    """What the blocks of a Stream share."""
    assert counters.numel() > rows
    p.parts, p.counters = parts.data_ptr(), counters.data_ptr()
    p.rows, p.usual, p.splits = rows, cut.usual, cut.splits


@functools.cache
def _launcher(
    shape: Shape, cut: Cut | Stream, rows: int, device: torch.device, folder: Path | None, overlaps: bool
) -> tuple[nvrtc.Launcher, Parameters]:
    parameters, blocks = Parameters(), cut.blocks(shape, rows, _processors(device))
    compiled = kernel(shape, cut.compiled if isinstance(cut, Stream) else cut, device, folder)
    shared, threads = cut.shared_bytes(shape), cut.threads(shape)
    return compiled.launcher(blocks, threads, shared, parameters, overlaps=overlaps), parameters


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def kernel(shape: Shape, cut: Cut | Stream, device: torch.device, folder: Path | None) -> nvrtc.Kernel:
    """Compiled or read from `folder` once a process and device."""
    options = shape.options + cut.options
    return nvrtc.build("attention_decode", text(cut.source(shape)), options, device, SHARED_BYTES, folder)
