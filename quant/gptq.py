"""GPTQ: columns are rounded one after another, and the columns still to come make up for each one's error.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quant.errors import NotFinite
from quant.grid import Grid, search
from quant.hessian import Hessian
from quant.pack import GroupInt
from quant.scheme import Scheme

# Columns rounded before their errors reach the columns beyond in one product.
BLOCK = 128
# Every failed factorization multiplies the damping; past the last one the matrix is rounded to nearest.
DAMP_STEP, DAMP_MOST = 10.0, 10.0
# What a channel without input counts for when its group's grid is chosen, as a share of the mean.
LEAST_IMPORTANCE = 0.01


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
    """Quantizes the matrices that read one input; together, because the work is in the columns. Raises NotFinite.

    Columns are rounded from the largest input to the smallest. With `scheme.act_order` the groups are formed in that
    order, each grid chosen when its turn comes; otherwise groups are neighbours, and all grids are chosen before.
    """
    h = hessian.matrix
    _refuse_not_finite(ws, h, names)
    joined = torch.cat([w.to(h) for w in ws])
    order = torch.argsort(h.diagonal(), descending=True, stable=True)
    factor, used = inverse_factor(h[order][:, order], damp)
    importance = None if factor is None else column_importance(h, used)
    packed = round_matrix(joined, factor, scheme, order, importance)
    fallback = None if factor is not None else f"the Hessian cannot be factored, not even with a damping of {used:g}"
    errors = relative_errors(joined, packed, h, [len(w) for w in ws])
    parts = _split(packed, [len(w) for w in ws])
    return [Solved(part, error, used, fallback) for part, error in zip(parts, errors, strict=True)]


def inverse_factor(h: Tensor, damp: float) -> tuple[Tensor | None, float]:
    """The upper triangular U with (H + damping)^-1 = U^T U, and the damping that was enough; None if none was.

    With the columns reversed H = R R^T for an upper triangular R, and U is R^-1: one factorization, no inverse of H.
    """
    diagonal = h.diagonal()
    live = diagonal > 0
    mean = mean_diagonal(h)
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


def mean_diagonal(h: Tensor) -> float:
    """Of the channels that have input; 1 where none has."""
    diagonal = h.diagonal()
    live = diagonal > 0
    return float(diagonal[live].mean()) if bool(live.any()) else 1.0


def column_importance(h: Tensor, damp: float) -> Tensor:  # [K]
    """What an error in each column costs while the other columns are as they were: the damped diagonal."""
    return h.diagonal() + max(damp, LEAST_IMPORTANCE) * mean_diagonal(h)


@dataclass(frozen=True, slots=True)
class Rounded:
    """Codes of a transposed matrix whose rows are in some order, and the grids of its groups."""

    codes: Tensor  # [K, N] uint8
    scale: Tensor  # [K/group, N] float32
    zero: Tensor  # [K/group, N] float32


def round_matrix(
    w: Tensor,  # [N, K]
    factor: Tensor | None,  # [K, K] of the ordered columns; None: to nearest
    scheme: Scheme,
    order: Tensor,  # [K]
    importance: Tensor | None,  # [K], of the columns as they are, for grids that are chosen before
) -> GroupInt:
    """Rounds the columns of `w` in `order`."""
    group, wt = scheme.width(w.shape[1]), w.T[order]
    if scheme.act_order:
        rounded = round_columns(wt, factor, scheme)
        codes, kept = rounded.codes, order
    else:
        rounded = round_columns(wt, factor, scheme, neighbours(w, scheme, importance), (order // group).tolist())
        codes, kept = torch.empty_like(rounded.codes), None
        codes[order] = rounded.codes
    zero = None if scheme.symmetric else rounded.zero.T.to(torch.uint8)
    return GroupInt.from_unsigned(scheme.bits, group, codes.T, rounded.scale.T.half().contiguous(), zero, kept)


def neighbours(w: Tensor, scheme: Scheme, importance: Tensor | None) -> Grid:  # [N, K], [K] -> [K/group, N]
    """The grids of neighbouring columns."""
    n, k = w.shape
    groups = w.T.reshape(-1, scheme.width(k), n)
    return search(
        groups, scheme.bits, scheme.symmetric, None if importance is None else importance.view(len(groups), -1)
    )


def round_columns(
    wt: Tensor,  # [K, N], overwritten
    factor: Tensor | None,  # [K, K]; None: to nearest
    scheme: Scheme,
    grid: Grid | None = None,  # [K/group, N]; None: each is chosen when the turn of its first row comes
    group_of: Sequence[int] | None = None,  # [K], of each row; None: neighbours
) -> Rounded:
    """Rounds the rows of a transposed matrix from first to last."""
    k, n = wt.shape
    group = scheme.width(k)
    group_of = group_of or [j // group for j in range(k)]
    scale, zero = wt.new_empty(2, k // group, n) if grid is None else (grid.scale, grid.zero)
    rounded = Rounded(torch.empty(k, n, dtype=torch.uint8, device=wt.device), scale, zero)
    step = _block(group, k) if grid is None else BLOCK
    diagonal = [1.0] * k if factor is None else factor.diagonal().tolist()
    for start in range(0, k, step):
        end = min(start + step, k)
        errors = torch.zeros_like(wt[start:end])
        for j in range(start, end):
            if grid is None and j % group == 0:
                _choose(wt, factor, scheme, rounded, j)
            error = _round_row(
                wt[j : j + 1], Grid(scheme.bits, scale[group_of[j]], zero[group_of[j]]), rounded.codes[j]
            )
            if factor is not None:
                torch.div(error[0], diagonal[j], out=errors[j - start])
                wt[j + 1 : end].addr_(factor[j, j + 1 : end], errors[j - start], alpha=-1)
        if factor is not None:
            wt[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    return rounded


def _block(group: int, k: int) -> int:
    """Whole groups, or whole parts of one that is chosen before its columns change."""
    if group <= BLOCK:
        return BLOCK // group * group
    return BLOCK if group == k or group % BLOCK == 0 else group


def _choose(wt: Tensor, factor: Tensor | None, scheme: Scheme, rounded: Rounded, start: int) -> None:
    """The grid of the group that begins at row `start`.

    An error of 1 in row j costs 1 / U[j, j]^2 once the rows below have made up for it.
    """
    end = start + scheme.width(len(wt))
    importance = None if factor is None else factor.diagonal()[start:end].square().reciprocal()
    grid = search(wt[start:end], scheme.bits, scheme.symmetric, importance)
    rounded.scale[start // (end - start)], rounded.zero[start // (end - start)] = grid.scale, grid.zero


def _round_row(w: Tensor, grid: Grid, codes: Tensor) -> Tensor:  # [1, N], codes [N] written -> [1, N]
    """The errors."""
    found = grid.codes(w)
    codes.copy_(found[0])
    return w - grid.values(found)


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
