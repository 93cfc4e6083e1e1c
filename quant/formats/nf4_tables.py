"""The values of bitsandbytes' 4-bit codes and of the 8-bit codes of nested scales."""

from __future__ import annotations

import torch
from torch import Tensor

NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# Sign, two bits of exponent, one of mantissa, scaled by 1/12; codes 0..7, then the same values negative.
FP4_POSITIVE = (0.0, 0.005208333333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
TABLES = {"nf4": NF4_VALUES, "fp4": FP4_POSITIVE + tuple(-v for v in FP4_POSITIVE)}
DECADES = 7
CELLS = 16


def table_of(kind: str) -> Tensor:  # [16] float32
    return torch.tensor(TABLES[kind], dtype=torch.float32)


def nested_table() -> Tensor:  # [256] float32, ascending
    """Seven decades of magnitudes, each cut into twice as many steps as the one below (dynamic tree quantization,
    Dettmers 2015), both signs, with 0 and 1."""
    values = [0.0, 1.0]
    for decade in range(DECADES):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        middles = (edges[:-1] + edges[1:]) / 2.0 * 10.0 ** (decade - DECADES + 1)
        values += [*middles.tolist(), *(-middles).tolist()]
    return torch.tensor(sorted(values), dtype=torch.float32)


def nearest(table: Tensor, values: Tensor) -> Tensor:  # uint8, the shape of `values`
    """Codes of the nearest values of a table in any order; a value in the middle takes the lower one."""
    ascending, codes = table.sort(stable=True)
    middles = (ascending[:-1] + ascending[1:]) / 2
    return codes[torch.bucketize(values, middles)].to(torch.uint8)


def nearest_nf4(values: Tensor) -> Tensor:  # -1..1 -> uint8, the shape of `values`
    """As `nearest` for NF4's table, ten times faster: a sixteenth holds at most one of the middles."""
    ascending = table_of("nf4")
    middles = (ascending[:-1] + ascending[1:]) / 2
    edges = torch.arange(-CELLS, CELLS + 1) / CELLS
    below = torch.bucketize(edges, middles)
    own = torch.cat((middles, torch.tensor([2.0])))[below]  # the next middle, which may lie in a later cell
    cells = (values * CELLS).floor_().add_(CELLS).int().flatten()
    device = values.device
    middle, base = own.to(device).index_select(0, cells), below.to(device, torch.uint8).index_select(0, cells)
    return (base + (values.flatten() > middle)).view(values.shape)
