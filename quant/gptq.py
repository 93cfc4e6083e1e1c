"""GPTQ: columns are rounded one after another, and the columns still to come make up for each one's error.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quant.errors import QuantError
from quant.grid import Grid, search
from quant.hessian import Hessian
from quant.pack import GroupInt
from quant.scheme import Scheme

# Columns rounded before their errors reach the columns beyond in one product.
BLOCK = 128
# Every failed factorization multiplies the damping; past the last one the matrix is rounded to nearest.
DAMP_STEP, DAMP_MOST = 10.0, 10.0


class NotFinite(QuantError):
    """Weights or their inputs hold NaN or infinity."""


@dataclass(frozen=True, slots=True)
class Solved:
    """One matrix after its solve.

    `error` is the relative error of the layer's output over the calibration tokens, sqrt(tr(E H E^T) / tr(W H W^T)).
    `fallback` says why the matrix was rounded to nearest instead.
    """

    packed: GroupInt
    error: float
    damp: float
    fallback: str | None = None


def gptq_solve(w: Tensor, hessian: Hessian, scheme: Scheme, *, damp: float = 0.01, name: str = "") -> Solved:
    """Quantizes one matrix [N, K]; see `gptq_solve_all`."""
    return gptq_solve_all([w], hessian, scheme, damp=damp, names=[name])[0]


def gptq_solve_all(
    ws: Sequence[Tensor],  # each [N, K]
    hessian: Hessian,
    scheme: Scheme,
    *,
    damp: float = 0.01,  # share of the mean diagonal that is added to it
    names: Sequence[str] = (),
) -> list[Solved]:
    """Quantizes the matrices that read one input; together, because the work is in the columns. Raises NotFinite."""
    h = hessian.matrix
    _refuse_not_finite(ws, h, names)
    joined = torch.cat([w.to(h) for w in ws])
    order = torch.argsort(h.diagonal(), descending=True, stable=True) if scheme.act_order else None
    wt = (joined if order is None else joined[:, order]).T.contiguous()
    sorted_h = h if order is None else h[order][:, order]
    factor, used = inverse_factor(sorted_h, damp)
    rounded = round_columns(wt, factor, scheme)
    packed = rounded.packed(scheme, order)
    fallback = None if factor is not None else f"the Hessian cannot be factored, not even with a damping of {used:g}"
    errors = relative_errors(joined, packed, h, [len(w) for w in ws])
    parts = _split(packed, [len(w) for w in ws])
    return [Solved(part, error, used, fallback) for part, error in zip(parts, errors, strict=True)]


@dataclass(frozen=True, slots=True)
class Rounded:
    """Codes of a transposed matrix and the grids of its groups."""

    codes: Tensor  # [K, N] uint8
    scale: Tensor  # [K/group, N] float32
    zero: Tensor  # [K/group, N] float32

    def packed(self, scheme: Scheme, order: Tensor | None) -> GroupInt:
        zero = None if scheme.symmetric else self.zero.T.to(torch.uint8)
        group = len(self.codes) // len(self.scale)
        return GroupInt.from_unsigned(scheme.bits, group, self.codes.T, self.scale.T.half().contiguous(), zero, order)


def inverse_factor(h: Tensor, damp: float) -> tuple[Tensor | None, float]:
    """The upper triangular U with (H + damping)^-1 = U^T U, and the damping that was enough; None if none was.

    With the columns reversed H = R R^T for an upper triangular R, and U is R^-1: one factorization, no inverse of H.
    """
    diagonal = h.diagonal()
    live = diagonal > 0
    mean = float(diagonal[live].mean()) if bool(live.any()) else 1.0
    reversed_h = h.flip(0, 1)
    dead = torch.where(live, 0.0, mean).flip(0)  # a channel without input is on its own
    while True:
        lower, failed = torch.linalg.cholesky_ex(reversed_h + torch.diag(dead + damp * mean))
        if not failed:
            eye = torch.eye(len(h), dtype=h.dtype, device=h.device)
            factor = torch.linalg.solve_triangular(lower, eye, upper=False).flip(0, 1)
            if bool(factor.isfinite().all()):
                return factor, damp
        if damp >= DAMP_MOST:
            return None, damp
        damp = max(damp * DAMP_STEP, 1e-3)


def round_columns(
    wt: Tensor,  # [K, N], overwritten
    factor: Tensor | None,  # [K, K]; None: to nearest
    scheme: Scheme,
) -> Rounded:
    """Rounds the rows of a transposed matrix from first to last; each group's grid is chosen when its turn comes."""
    k, n = wt.shape
    group = scheme.width(k)
    rounded = Rounded(torch.empty(k, n, dtype=torch.uint8, device=wt.device), *wt.new_empty(2, k // group, n))
    for start in range(0, k, _block(group, k)):
        end = min(start + _block(group, k), k)
        errors = _round_block(wt, factor, scheme, rounded, start, end)
        if factor is not None:
            wt[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    return rounded


def _block(group: int, k: int) -> int:
    """Whole groups, or whole parts of one that is chosen before its columns change."""
    if group <= BLOCK:
        return BLOCK // group * group
    return BLOCK if group == k or group % BLOCK == 0 else group


def _round_block(
    wt: Tensor, factor: Tensor | None, scheme: Scheme, rounded: Rounded, start: int, end: int
) -> Tensor:  # [end - start, N]
    """Rounds some rows and updates the rest of them; returns what the rows beyond have to make up for."""
    group = scheme.width(len(wt))
    errors = torch.zeros_like(wt[start:end])
    diagonal = [1.0] * len(wt) if factor is None else factor.diagonal().tolist()
    for j in range(start, end):
        if j % group == 0:
            grid = search(wt[j : j + group].T, scheme.bits, scheme.symmetric)
            rounded.scale[j // group], rounded.zero[j // group] = grid.scale, grid.zero
        else:
            grid = Grid(scheme.bits, rounded.scale[j // group], rounded.zero[j // group])
        code = grid.codes(wt[j, :, None])
        rounded.codes[j] = code[:, 0]
        if factor is not None:
            torch.sub(wt[j], grid.values(code)[:, 0], out=errors[j - start]).div_(diagonal[j])
            wt[j + 1 : end].addr_(factor[j, j + 1 : end], errors[j - start], alpha=-1)
    return errors


def relative_errors(w: Tensor, packed: GroupInt, h: Tensor, rows: Sequence[int]) -> list[float]:
    """Of each run of rows of `w`; 0 where the output is."""
    wrong, right = (((m @ h) * m).sum(-1).double().clamp_(min=0) for m in (packed.dequantize() - w, w))
    pairs = zip(torch.split(wrong, list(rows)), torch.split(right, list(rows)), strict=True)
    return [float((a.sum() / b.sum()).sqrt()) if bool(b.sum() > 0) else 0.0 for a, b in pairs]


def _split(packed: GroupInt, rows: Sequence[int]) -> list[GroupInt]:
    ends = [sum(rows[: i + 1]) for i in range(len(rows))]
    return [packed.rows(slice(end - count, end)) for end, count in zip(ends, rows, strict=True)]


def _refuse_not_finite(ws: Sequence[Tensor], h: Tensor, names: Sequence[str]) -> None:
    names = names or [""] * len(ws)
    if not bool(h.isfinite().all()):
        where = ", ".join(filter(None, names)) or "this layer"
        raise NotFinite(f"The inputs of {where} hold NaN or infinity: calibrate in float32, or check the checkpoint.")
    for w, name in zip(ws, names, strict=True):
        if not bool(w.isfinite().all()):
            raise NotFinite(f"The weights of {name or 'this layer'} hold NaN or infinity: the checkpoint is damaged.")
