"""A mixture of experts on the GPU, in four launches: route, gate and up, down, sum. No answer depends on the host.

An expert without tokens is not read, so a single token costs the weights of its own experts only.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quant.kernels import rows_cuda
from quant.kernels.layout import DeviceInt
from quant.kernels.moe_kernel import experts_kernel
from quant.kernels.moe_route import combine_kernel, route_kernel
from quant.kernels.unpack_triton import KINDS, dependent, supported, target
from quant.layers.around import Gate

ROUTE_BLOCK = 64
FEW_PAIRS = 128  # up to which rows.cu is faster than Triton with packed experts
ENOUGH_BLOCKS = 264  # two for each multiprocessor of an H200


class Routing(NamedTuple):
    shares: Tensor  # [T, active] float32, each row sums to 1
    order: Tensor  # [T * active] int32: pairs (token * active + place), sorted by expert
    places: Tensor  # [T * active] int32: where each pair is in `order`
    starts: Tensor  # [E + 1] int32: where each expert's pairs begin in `order`
    active: int


class Block(NamedTuple):
    """A block computes `rows` outputs of up to `batch` tokens, `columns` of the inputs at a time."""

    rows: int
    batch: int
    columns: int
    stages: int
    warps: int


def moe_forward(
    x: Tensor,  # [T, H] bfloat16 or float16
    router_logits: Tensor,  # [T, E]
    gate_up: Tensor | DeviceInt,  # [E, 2I, H], or packed with the experts' rows one after the other: [E * 2I, H]
    down: Tensor | DeviceInt,  # [E, H, I], or packed [E * H, I]
    active: int,
    gate: Gate,
    folder: Path | None = None,  # of compiled kernels
) -> Tensor:  # [T, H]
    """The `active` strongest experts of each token by the softmax of its logits, renormalised; always the same bits."""
    experts = router_logits.shape[1]
    if x.shape[0] == 0:
        return torch.empty_like(x)
    routing = route(router_logits, active)
    hidden = _products(x, routing, gate_up, experts, gate, folder)[0]
    return _combine(_products(hidden, routing, down, experts, None, folder), routing, x)


def fits(gate_up: Tensor | DeviceInt, down: Tensor | DeviceInt, dtype: torch.dtype) -> bool:
    """Whether `moe_forward` computes it: rows of whole 16 bytes for the copy engine."""
    packed = [supported(w, dtype) for w in (gate_up, down) if isinstance(w, DeviceInt)]
    plain = [w.dtype == dtype and w.shape[-1] % 8 == 0 for w in (gate_up, down) if isinstance(w, Tensor)]
    return dtype in KINDS and all(packed + plain)


def route(router_logits: Tensor, active: int) -> Routing:  # [T, E]
    t, e = router_logits.shape
    chosen, order, places = (router_logits.new_empty(t * active, dtype=torch.int32) for _ in range(3))
    shares = router_logits.new_empty(t, active, dtype=torch.float32)
    starts = router_logits.new_empty(e + 1, dtype=torch.int32)
    route_kernel[(1,)](
        router_logits.contiguous(), chosen, shares, order, places, starts, t,
        E=e, EP=triton.next_power_of_2(e), ACTIVE=active, BLOCK=ROUTE_BLOCK,
    )  # fmt: skip
    return Routing(shares, order, places, starts, active)


def _products(
    x: Tensor,  # [T, K], or [T * active, K] in the experts' order where there is no gate
    routing: Routing,
    weights: Tensor | DeviceInt,
    experts: int,
    gate: Gate | None,
    folder: Path | None,
) -> Tensor:  # [parts, T * active, N]
    few = len(routing.order) <= FEW_PAIRS
    if few and isinstance(weights, DeviceInt) and rows_cuda.supported(weights, x.dtype):
        return _packed_products(x, routing, weights, experts, gate, folder)[None]
    pairs = routing.order.shape[0]
    plain = isinstance(weights, Tensor)
    matrix = weights.flatten(0, 1) if isinstance(weights, Tensor) else weights.words
    n = matrix.shape[0] // experts // (2 if gate else 1)
    block = choose(pairs / experts, plain)
    k = matrix.shape[1] if isinstance(weights, Tensor) else weights.K
    blocks, tiles = min(experts, pairs) + pairs // block.batch, triton.cdiv(n, block.rows)
    parts = 1 if gate else _parts(min(experts, pairs) * tiles, pairs, triton.cdiv(k, block.columns))
    out = x.new_empty(parts, pairs, n, dtype=x.dtype if parts == 1 else torch.float32)
    words = block.columns if plain else block.columns * matrix.shape[1] // k
    experts_kernel[(blocks, tiles, parts)](
        x, routing.order, routing.starts,
        TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [block.rows, words]),
        *_packing(weights, matrix), out, gate.threshold if gate else 0.0, pairs, n, k, _groups(weights), x.stride(0),
        matrix.shape[0], E=experts, EP=triton.next_power_of_2(experts), ACTIVE=routing.active if gate else 0,
        GATE=gate.kind if gate else "", **_form(weights, x, block), BN=block.rows, BT=block.batch, BK=block.columns,
        STAGES=block.stages, num_warps=block.warps, **dependent(x),
    )  # fmt: skip
    return out


def _packed_products(
    x: Tensor, routing: Routing, w: DeviceInt, experts: int, gate: Gate | None, folder: Path | None
) -> Tensor:  # [T * active, N]
    pairs = len(routing.order)
    out = x.new_empty(pairs, w.N // experts // (2 if gate else 1))
    form = rows_cuda.choose_experts(pairs, experts, w, x.dtype, gate)
    around = rows_cuda.Around(
        gate=gate, order=routing.order, starts=routing.starts, active=routing.active if gate else 0
    )
    rows_cuda.launch(form, x, w, out, min(experts, pairs) + pairs // form.batch, around, folder)
    return out


def _combine(y: Tensor, routing: Routing, x: Tensor) -> Tensor:  # [parts, T * active, H]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    wide = min(1024, triton.next_power_of_2(x.shape[1]))
    combine_kernel[(x.shape[0], triton.cdiv(x.shape[1], wide))](
        y, routing.shares, routing.places, out, x.shape[0], x.shape[1],
        ACTIVE=routing.active, PARTS=y.shape[0], BH=wide, **dependent(x),
    )  # fmt: skip
    return out


def choose(tokens: float, plain: bool) -> Block:  # tokens: of an expert, on average
    batch = min(128, max(16, triton.next_power_of_2(math.ceil(tokens))))
    if batch < 128:
        return Block(64, batch, 128, 4 if plain else 3, 4)
    return Block(128, batch, 64, 4, 8) if plain else Block(64, batch, 128, 3, 4)


def _parts(tiles: int, pairs: int, chunks: int) -> int:
    """Parts of the columns, whose sums `combine` adds: where there are few tokens there are few blocks."""
    return max(1, min(ENOUGH_BLOCKS // tiles, chunks // 4, 4)) if pairs <= 128 else 1


def _packing(weights: Tensor | DeviceInt, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if isinstance(weights, Tensor):
        return matrix, matrix, matrix
    zero, shift = (matrix if t is None else t for t in (weights.zero, weights.shift))
    return weights.scale, zero, shift


def _groups(weights: Tensor | DeviceInt) -> int:
    return 1 if isinstance(weights, Tensor) else weights.scale.shape[1]


def _form(weights: Tensor | DeviceInt, x: Tensor, block: Block) -> dict[str, object]:
    """How the weights are packed, as the kernel is told."""
    if isinstance(weights, Tensor):
        asm = "" if x.device.type == "cpu" else "none"
        return {"BITS": 16, "GROUP": 1, "SUB": 1, "ZERO": False, "SHIFT": False, "BIAS": 0, "ASM": asm}
    return target(weights, x, block.columns)
