"""Packed integers to plain weights in CUDA C++, whose launch costs the host a fifth of what Triton's does."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from torch import Tensor

from quant.kernels import nvrtc, targets
from quant.kernels.gemv import SCALES
from quant.kernels.layout import DeviceInt

SOURCE = Path(__file__).with_name("dequantize.cu")
PIECE = 8  # weights that a thread writes at once
ALIGNMENT = 16  # bytes


class Parameters(ctypes.Structure):
    """`Params` of the kernel, field by field."""

    _fields_ = (
        ("words", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
        ("shift", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


@dataclass(frozen=True, slots=True)
class Form:
    """What the kernel is compiled for."""

    bits: int
    half: bool  # float16, else bfloat16
    scale: int
    kind: int  # 0: every zero point is the middle; 1: zero points; 2: shifts
    group: int  # pieces under one scale
    threads: int = 256
    pieces: int = 4  # that a thread asks for at once

    @property
    def options(self) -> tuple[str, ...]:
        names = ("BITS", "HALF", "SCALE", "KIND", "GROUP", "THREADS", "PIECES")
        return tuple(f"-D{name}={int(value)}" for name, value in zip(names, astuple(self), strict=True))


def supported(w: DeviceInt, out: Tensor) -> bool:
    """Groups of whole pieces, 16-bit weights, tensors that lie on 16-byte boundaries."""
    if w.group % PIECE or out.dtype not in (torch.bfloat16, torch.float16) or out.numel() // PIECE >= 2**31:
        return False
    tensors = (t for t in (w.words, w.scale, w.zero, w.shift, out) if t is not None)
    aligned = all(t.is_contiguous() and t.data_ptr() % ALIGNMENT == 0 for t in tensors)
    return aligned and targets.unavailable(out.device) is None


def form_of(w: DeviceInt, dtype: torch.dtype) -> Form:
    kind = 2 if w.shift is not None else 0 if w.zero is None else 1
    return Form(w.bits, dtype == torch.float16, SCALES[w.scale.dtype], kind, w.group // PIECE)


def fill(w: DeviceInt, out: Tensor, folder: Path | None, form: Form | None = None) -> None:  # [N, K]
    """`out` becomes the weights; `form`: another than the usual one."""
    form, count = form or form_of(w, out.dtype), out.numel() // PIECE
    if not count:
        return
    launcher, p = _launcher(form, -(-count // (form.threads * form.pieces)), out.device, folder)
    p.words, p.scale, p.out, p.count = w.words.data_ptr(), w.scale.data_ptr(), out.data_ptr(), count
    p.zero = None if w.zero is None else w.zero.data_ptr()
    p.shift = None if w.shift is None else w.shift.data_ptr()
    launcher(torch.cuda.current_stream(out.device).cuda_stream)


@functools.cache
def _launcher(form: Form, blocks: int, device: torch.device, folder: Path | None) -> tuple[nvrtc.Launcher, Parameters]:
    parameters = Parameters()
    return kernel(form, device, folder).launcher(blocks, form.threads, 0, parameters), parameters


@functools.cache
def kernel(form: Form, device: torch.device, folder: Path | None) -> nvrtc.Kernel:
    """Compiled or read from `folder` once a process and device."""
    return nvrtc.build("dequantize", SOURCE.read_text(), form.options, device, 0, folder)
