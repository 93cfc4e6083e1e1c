"""Matrices as Hopper's copy engine sees them: the driver's CUtensorMap."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

from quant.kernels.nvrtc import KernelError

MAP_BYTES = 128
WORD_TYPE = {2: 1, 4: 2}  # CUtensorMapDataType of unsigned numbers, by their bytes
SWIZZLE_64, SWIZZLE_128 = 2, 3  # CUtensorMapSwizzle
PROMOTE_256 = 3  # CUtensorMapL2promotion: a box's row asks for the rest of its 256 bytes


class Map(NamedTuple):
    """Numbers as the copy engine sees them, the innermost dimension first, and the box of them that one copy takes."""

    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # bytes, of all dimensions but the first
    box: tuple[int, ...]
    number: int  # bytes
    swizzle: int


@functools.lru_cache(maxsize=1 << 14)  # a model's matrices and the activations that lie where others did
def encoded(m: Map) -> bytes:
    """The map in the driver's words."""
    to, rank = (ctypes.c_uint64 * (MAP_BYTES // 8 + 8))(), len(m.sizes)
    at = -(-ctypes.addressof(to) // 64) * 64
    status = _encoder()(
        ctypes.c_void_p(at), WORD_TYPE[m.number], rank, ctypes.c_void_p(m.address),
        (ctypes.c_uint64 * rank)(*m.sizes), (ctypes.c_uint64 * (rank - 1))(*m.strides),
        (ctypes.c_uint32 * rank)(*m.box), (ctypes.c_uint32 * rank)(*[1] * rank),
        0, m.swizzle, PROMOTE_256, 0,
    )  # fmt: skip
    if status:
        raise KernelError(f"CUDA refused to describe a matrix to the copy engine: error {status} for {m}")
    return ctypes.string_at(at, MAP_BYTES)


@functools.cache
def _encoder() -> Callable[..., int]:
    return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled  # type: ignore[no-any-return]
