"""`sampling` on Hopper: what the kernel in sampling_row.cu, _search.cu and _draw.cu is told."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from minicpm_cli.kernels.sampling import DrawState, PenaltyState
from quant.kernels import nvrtc

FOLDER = Path(__file__).parent
SOURCES = ("sampling_row.cu", "sampling_search.cu", "sampling_draw.cu")
THREADS, LIST = 512, 2048
SHARED_BYTES = 49800  # `Memory` of the kernel
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Blocks of a row, and of a launch while there are several. Top-p of 64 rows took 50, 91 and 186 us of an H200 by 2, 4
# and 8 blocks each, of 256 rows 110 and 137 us by 1 and 2, of one row 45, 40 and 49 by 2, 4 and 8.
MOST_BLOCKS, AT_ONCE = 4, 132
LONGEST = 1 << 17  # scores of a block whose masses 32 bits hold


class Parameters(ctypes.Structure):
    """`Params` of the kernel, field by field."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("seed", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("temperature", ctypes.c_void_p),
        ("top_p", ctypes.c_void_p),
        ("min_p", ctypes.c_void_p),
        ("top_k", ctypes.c_void_p),
        ("seat", ctypes.c_void_p),
        ("repetition", ctypes.c_void_p),
        ("frequency", ctypes.c_void_p),
        ("presence", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("allowed", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("peaks", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("allowed_stride", ctypes.c_int),
        ("vocab", ctypes.c_int),
        ("kind", ctypes.c_int),
    )


def source() -> str:
    return "\n".join((FOLDER / name).read_text() for name in SOURCES)


def options(threads: int, listed: int) -> tuple[str, ...]:
    return f"-DTHREADS={threads}", f"-DLIST={listed}"


def blocks_for(rows: int, vocab: int) -> int:
    """Blocks of a row, a power of 2."""
    least = 1 << (-(-vocab // LONGEST) - 1).bit_length()
    blocks = max(MOST_BLOCKS, least)
    while blocks > least and rows * blocks > AT_ONCE:
        blocks //= 2
    return blocks


def set_call(
    p: Parameters,
    logits: Tensor,  # [S, V], rows apart
    state: DrawState | None,
    penalties: PenaltyState | None,
    allowed: Tensor | None,
    ids: Tensor,
    peaks: Tensor,
) -> None:
    p.logits, p.stride, p.vocab, p.kind = logits.data_ptr(), logits.stride(0), logits.shape[1], KINDS[logits.dtype]
    for names, given in ((("seed", "index", "temperature", "top_p", "min_p", "top_k"), state),
                         (("seat", "repetition", "frequency", "presence", "counts"), penalties)):  # fmt: skip
        for name in names:
            setattr(p, name, None if given is None else getattr(given, name).data_ptr())
    p.allowed, p.allowed_stride = (None, 0) if allowed is None else (allowed.data_ptr(), allowed.stride(0))
    p.ids, p.peaks = ids.data_ptr(), peaks.data_ptr()


class CUDADraws:
    """Takes no memory but the logits, and leaves them as they are."""

    def __init__(self, device: torch.device, folder: Path | None = None) -> None:
        self.kernel = kernel(device, folder)
        self._launchers: dict[tuple[int, int], tuple[nvrtc.Launcher, Parameters]] = {}

    def __call__(
        self,
        logits: Tensor,  # [S, V]
        state: DrawState | None,
        penalties: PenaltyState | None,
        allowed: Tensor | None,
        ids: Tensor,
        peaks: Tensor,
    ) -> None:
        """See `sampling.Draws`."""
        assert logits.stride(1) == 1
        assert state is None or state.top_p.dtype == torch.float64
        launcher, p = self._launcher(*logits.shape)
        set_call(p, logits, state, penalties, allowed, ids, peaks)
        launcher(torch.cuda.current_stream(logits.device).cuda_stream)

    def _launcher(self, rows: int, vocab: int) -> tuple[nvrtc.Launcher, Parameters]:
        if (rows, vocab) not in self._launchers:
            p, blocks = Parameters(), blocks_for(rows, vocab)
            launcher = self.kernel.launcher(rows * blocks, THREADS, SHARED_BYTES, p, cluster=blocks)
            self._launchers[rows, vocab] = launcher, p
        return self._launchers[rows, vocab]


@functools.cache
def kernel(device: torch.device, folder: Path | None) -> nvrtc.Kernel:
    """Compiled or read from `folder` once a process and device."""
    return nvrtc.build("sampling", source(), options(THREADS, LIST), device, SHARED_BYTES, folder)
