"""From a layer's plain weights to the tensors of its file format, by any of the methods."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minicpm_cli.errors import WeightsError
from minicpm_cli.quantize.calibration import TOKENS_AN_INPUT
from minicpm_cli.quantize.forms import from_file, nearest, searched, to_file
from minicpm_cli.quantize.gather import Inputs
from minicpm_cli.quantize.layers import Group, Layer
from minicpm_cli.quantize.recipe import Recipe
from minicpm_cli.quantize.report import LayerReport
from quant.correction import corrected
from quant.errors import QuantError
from quant.gptq import gptq_solve_all
from quant.pack import Packed
from quant.scheme import Scheme


@dataclass(frozen=True, slots=True)
class Solution:
    """`tensors` are the layer's in the file, by suffix, in host memory; `weight` [N, K] is what they stand for."""

    layer: Layer
    tensors: dict[str, Tensor]
    weight: Tensor
    report: LayerReport


def solve(
    group: Group,
    weights: Sequence[Tensor],  # each [N, K]
    inputs: Inputs | None,
    recipe: Recipe,
    dtype: torch.dtype,
) -> list[Solution]:
    """Quantizes the layers of a group on their weights' device. Raises WeightsError for weights that are not finite."""
    try:
        tokens = inputs.hessian.tokens if inputs is not None else 0
        if inputs is not None and not _seldom(group, tokens):
            return _solved(group, weights, inputs, recipe, dtype)
        pairs = zip(group.layers, weights, strict=True)
        if inputs is None:
            return [_rounded(layer, w, nearest(w, recipe.scheme), dtype) for layer, w in pairs]
        note = f"saw {tokens} tokens, rounded to nearest"
        return [_rounded(layer, w, searched(w, recipe.scheme), dtype, tokens, note) for layer, w in pairs]
    except QuantError as error:
        raise WeightsError(f"{group.layers[0].name}: {error}") from error


def _seldom(group: Group, tokens: int) -> bool:
    """Whether an expert saw too few tokens to learn from."""
    return group.expert and tokens < TOKENS_AN_INPUT * group.columns


def _solved(
    group: Group, weights: Sequence[Tensor], inputs: Inputs, recipe: Recipe, dtype: torch.dtype
) -> list[Solution]:
    names, hessian = [layer.name for layer in group.layers], inputs.hessian
    if inputs.aim is not None:
        whole = corrected(torch.cat(list(weights)), hessian, inputs.aim, strength=recipe.correction)
        weights = torch.split(whole, [layer.rows for layer in group.layers])
    found = gptq_solve_all(weights, hessian, recipe.scheme, damp=recipe.damp, names=names)
    solutions = []
    for layer, one in zip(group.layers, found, strict=True):
        note = one.fallback
        if note is None and one.damp > recipe.damp:
            note = f"damping raised to {one.damp:g}"
        report = LayerReport(layer.name, layer.rows, layer.columns, one.error, hessian.tokens, one.damp, note)
        solutions.append(_solution(layer, one.packed, dtype, report))
    return solutions


def _rounded(
    layer: Layer, weight: Tensor, packed: Packed, dtype: torch.dtype, tokens: int = 0, note: str | None = None
) -> Solution:
    error = weight_error(weight, packed.dequantize())
    report = LayerReport(layer.name, layer.rows, layer.columns, error, tokens, None, note)
    return _solution(layer, packed, dtype, report)


def _solution(layer: Layer, packed: Packed, dtype: torch.dtype, report: LayerReport) -> Solution:
    if not math.isfinite(report.error):
        raise WeightsError(f"{layer.name} came out with NaN or infinity; quantize in float32 (--dtype fp32)")
    return Solution(layer, to_file(packed), packed.dequantize(dtype), report)


def rounded(layer: Layer, weight: Tensor, scheme: Scheme) -> Solution:
    """One layer by its own values alone, the weights in float32."""
    try:
        return _rounded(layer, weight, nearest(weight, scheme), torch.float32)
    except QuantError as error:
        raise WeightsError(f"{layer.name}: {error}") from error


def restored(tensors: dict[str, Tensor], scheme: Scheme, device: torch.device) -> Tensor:  # [N, K]
    """The weights that a layer's stored tensors stand for, the same as when they were solved."""
    weight: Tensor = from_file(tensors, scheme).to(device).dequantize()
    return weight


def weight_error(before: Tensor, after: Tensor) -> float:
    """Relative to the weights' norm."""
    norm = before.float().norm()
    return float((after - before.float()).norm() / norm) if norm > 0 else 0.0
