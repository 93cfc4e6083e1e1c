"""Packed integers to plain weights in CUDA C++, whose launch costs the host a fifth of what Triton's does."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from torch import Tensor

from quant.kernels import nvrtc, targets
from quant.kernels.forms import definitions, kind_of
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
    threads: int = 512
    pieces: int = 2  # that a thread asks for at once; 2.4e9 weights in 1.65 ms, a copy's speed but for the smallest

    @property
    def options(self) -> tuple[str, ...]:
        return definitions("BITS HALF SCALE KIND GROUP THREADS PIECES", astuple(self))


def supported(w: DeviceInt, dtype: torch.dtype) -> bool:
    """Groups of whole pieces, 16-bit weights, tensors that lie on 16-byte boundaries."""
    if w.group % PIECE or dtype not in (torch.bfloat16, torch.float16) or w.N * w.K // PIECE >= 2**31:
        return False
    tensors = (t for t in (w.words, w.scale, w.zero, w.shift) if t is not None)
    aligned = all(t.is_contiguous() and t.data_ptr() % ALIGNMENT == 0 for t in tensors)
    return aligned and targets.unavailable(w.words.device) is None


def form_of(w: DeviceInt, dtype: torch.dtype) -> Form:
    return Form(*kind_of(w, dtype), w.group // PIECE)


class Dequantize:
    """The launch for one matrix: of all that it is told only the place of the weights changes from call to call."""

    def __init__(self, w: DeviceInt, dtype: torch.dtype, folder: Path | None = None, form: Form | None = None) -> None:
        form, self.device, count = form or form_of(w, dtype), w.words.device, w.N * w.K // PIECE
        self.packed = w  # the launch holds only its addresses
        self._told = Parameters(words=w.words.data_ptr(), scale=w.scale.data_ptr(), count=count)
        self._told.zero = None if w.zero is None else w.zero.data_ptr()
        self._told.shift = None if w.shift is None else w.shift.data_ptr()
        blocks = max(1, -(-count // (form.threads * form.pieces)))
        self._launch = kernel(form, self.device, folder).launcher(blocks, form.threads, 0, self._told)

    def __call__(self, out: Tensor) -> None:  # [N, K], contiguous, on a 16-byte boundary
        if out.numel():
            self._told.out = out.data_ptr()
            self._launch(torch.cuda.current_stream(self.device).cuda_stream)


@functools.cache
def kernel(form: Form, device: torch.device, folder: Path | None) -> nvrtc.Kernel:
    """Compiled or read from `folder` once a process and device."""
    return nvrtc.build("dequantize", SOURCE.read_text(), form.options, device, 0, folder)
