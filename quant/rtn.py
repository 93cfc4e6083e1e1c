"""Round-to-nearest: weights quantized by their own range alone, without calibration."""

from __future__ import annotations

import torch
from torch import Tensor

from quant.errors import QuantError, SchemeError
from quant.formats import fp8, int8, nf4
from quant.pack import GroupInt, Packed, join
from quant.scheme import NF4_BLOCK, Scheme

# Weights worked on at once: the temporaries of a chunk stay in the second-level cache.
CHUNK = 1 << 17
GPU_CHUNK = 1 << 23  # small ones would be launches and nothing else there; five float32 copies of one are alive
# Chunks of so many rows are whole blocks of NF4 at any length of rows.
ROWS = NF4_BLOCK
LARGEST_HALF = 65504.0


def rtn(w: Tensor, scheme: Scheme) -> Packed:  # w [N, K], any float type
    """The nearest quantized weights under `scheme`; its act_order does not matter here."""
    n, k = w.shape
    if not scheme.divides(k):
        raise SchemeError(f"{scheme.name} does not fit rows of {k}: groups must divide them ({_advice(scheme, k)}).")
    step = ROWS * max(1, (CHUNK if w.device.type == "cpu" else GPU_CHUNK) // (k * ROWS))
    return join([_chunk(w[start : start + step], scheme) for start in range(0, n, step)])


def _advice(scheme: Scheme, k: int) -> str:
    groups = ", ".join(map(str, scheme.groups_for(k)))
    return f"{groups} do" if groups else "none of the usual ones does"


def _chunk(w: Tensor, scheme: Scheme) -> Packed:
    match scheme.kind:
        case "nf4":
            _check_finite(w.abs().amax())
            return nf4.quantize(w)
        case "int8":
            rows = int8.quantize(w)
            _check_finite(rows.absmax)
            return rows
        case "fp8":
            codes, scale = fp8.quantize(w)
            _check_finite(scale)
            return fp8.FP8(codes, scale[:, 0])
        case "int":
            return _groups(w, scheme)


def _check_finite(range_or_scale: Tensor) -> None:
    if not bool(torch.isfinite(range_or_scale).all()):
        raise QuantError("The weights hold NaN or infinity and cannot be quantized.")


def _groups(w: Tensor, scheme: Scheme) -> GroupInt:
    n, k = w.shape
    grouped = w.float().reshape(n, -1, scheme.width(k))  # [N, G, group]
    low, high = grouped.amin(-1), grouped.amax(-1)  # aminmax takes eight times as long
    _check_finite(low + high)
    scale, zero = min_max(low, high, scheme.bits, symmetric=scheme.symmetric)
    codes = (grouped / scale[..., None].float()).round_().add_(zero[..., None]).clamp_(0, 2**scheme.bits - 1)
    kept = None if scheme.symmetric else zero
    return GroupInt.from_unsigned(scheme.bits, scheme.width(k), codes.view(n, k), scale, kept)


def min_max(low: Tensor, high: Tensor, bits: int, *, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scales (float16) and zero points (float32, whole, 1..2^bits-1) that cover `low`..`high` of each group.

    Zero point 0 is left out: GPTQ's first file version cannot hold it.
    """
    top = 2**bits - 1
    if symmetric:
        scale = torch.maximum(-low, high).clamp_min(0) * (2 / top)
        return _half(scale), torch.full_like(scale, 2 ** (bits - 1))
    low, high = low.clamp_max(0), high.clamp_min(0)
    scale = (high - low) / top
    zero = (-low / _divisor(scale)).round_().clamp_(1, top)
    scale = torch.where(zero == 1, torch.maximum(scale, high / (top - 1)), scale)
    return _half(scale), zero


def _divisor(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale)


def _half(scale: Tensor) -> Tensor:
    """As float16; a group of zeros, or of values too small for float16, gets scale 1 and so codes of zero."""
    half = scale.clamp_max(LARGEST_HALF).half()
    return torch.where(half == 0, torch.ones_like(half), half)
