"""bitsandbytes' 4-bit weights: a table of 16 values times the largest magnitude of each block of the flat matrix.

NF4's table is from QLoRA (Dettmers et al. 2023, appendix E). The scales may themselves be 8-bit codes ("nested").
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quant.errors import FormatError
from quant.formats.nf4_tables import TABLES, nearest, nearest_nf4, nested_table, table_of
from quant.formats.tensors import Tensors, need

BLOCK = 64
NESTED_BLOCK = 256
STATE = "weight.quant_state.bitsandbytes__"
TINY = 1e-38
# Weights unpacked at once on the CPU, whole blocks of any size that bitsandbytes has (see quant.pack).
CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Nested:
    """Scales as codes of a table of 256: table[codes] * absmax[i // 256] + offset."""

    codes: Tensor  # [blocks] uint8
    absmax: Tensor  # [ceil(blocks / 256)] float32
    table: Tensor  # [256] float32
    offset: float
    block: int = NESTED_BLOCK

    def plain(self) -> Tensor:  # [blocks] float32
        scale = self.absmax.repeat_interleave(self.block)[: self.codes.numel()]
        return self.table[self.codes.int()] * scale + self.offset

    def to(self, device: torch.device) -> Nested:
        return replace(self, codes=self.codes.to(device), absmax=self.absmax.to(device), table=self.table.to(device))

    @property
    def nbytes(self) -> int:
        return self.codes.numel() + 4 * (self.absmax.numel() + self.table.numel())


@dataclass(frozen=True, slots=True)
class NF4:
    """W.flatten()[i] = table[code[i]] * absmax[i // block]; blocks may run across the ends of rows."""

    codes: Tensor  # [ceil(N*K / 2), 1] uint8, the even element in the high half
    absmax: Tensor | Nested  # [blocks] float32
    shape: tuple[int, int]
    block: int = BLOCK
    kind: str = "nf4"  # or "fp4"
    dtype: torch.dtype = torch.bfloat16  # of the weights before: bitsandbytes computes in it

    @property
    def nbytes(self) -> int:
        scales = self.absmax.nbytes if isinstance(self.absmax, Nested) else 4 * self.absmax.numel()
        return self.codes.numel() + scales

    @property
    def scales(self) -> Tensor:  # [blocks] float32
        return self.absmax.plain() if isinstance(self.absmax, Nested) else self.absmax

    def to(self, device: torch.device) -> NF4:
        return replace(self, codes=self.codes.to(device), absmax=self.absmax.to(device))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:  # [N, K]
        """The weights, computed in float32 and rounded once to `dtype`."""
        n, k = self.shape
        codes, scales, pairs = self.codes.flatten(), self.scales, _byte_pairs(self.kind, self.codes.device)
        flat = torch.empty(2 * codes.numel(), dtype=dtype, device=codes.device)
        step = CHUNK if codes.device.type == "cpu" else flat.numel()
        for start in range(0, flat.numel(), step):
            w = pairs.index_select(0, codes[start // 2 : (start + step) // 2].int()).view(torch.float32)
            scale = scales[start // self.block : -(-(start + step) // self.block)]
            flat[start : start + step] = _scaled(w, scale, self.block)
        return flat[: n * k].view(n, k)

    def rows(self, index: Tensor | slice) -> NF4:
        """The rows `index` as a matrix of their own; FormatError where blocks run across rows."""
        n, k = self.shape
        if k % self.block:
            raise FormatError(f"Rows of {k} share blocks of {self.block}; dequantize the whole matrix.")
        codes, scales = self.codes.view(n, -1)[index], self.scales.view(n, -1)[index]
        return replace(self, codes=codes.reshape(-1, 1), absmax=scales.flatten(), shape=(codes.shape[0], k))

    def like(self, other: object) -> bool:
        """Whether the two can be joined by `cat`: nested scales have an offset of their own, so they stay apart."""
        if not isinstance(other, NF4) or isinstance(self.absmax, Nested) or isinstance(other.absmax, Nested):
            return False
        whole = self.shape[0] * self.shape[1] % self.block == 0 and other.shape[0] * other.shape[1] % other.block == 0
        mine, theirs = ((p.block, p.kind, p.dtype, p.shape[1]) for p in (self, other))
        return whole and mine == theirs

    @staticmethod
    def cat(parts: Sequence[NF4]) -> NF4:
        """One matrix out of the rows of several, all but the last of whole blocks."""
        shape = (sum(p.shape[0] for p in parts), parts[0].shape[1])
        return replace(
            parts[0],
            codes=torch.cat([p.codes for p in parts]),
            absmax=torch.cat([p.scales for p in parts]),
            shape=shape,
        )


def _byte_pairs(kind: str, device: torch.device) -> Tensor:  # [256] int64: the two float32 values of a byte
    table, byte = table_of(kind).to(device), torch.arange(256, device=device)
    return torch.stack((table[byte >> 4], table[byte & 15]), -1).view(torch.int64)[:, 0]


def _scaled(w: Tensor, scale: Tensor, block: int) -> Tensor:  # [C], [ceil(C / block)], in place where blocks are whole
    if w.numel() % block:
        return w * scale.repeat_interleave(block)[: w.numel()]
    w.view(-1, block).mul_(scale[:, None])
    return w


def quantize(w: Tensor, *, kind: str = "nf4", nested: bool = False) -> NF4:  # w [N, K]
    """As bitsandbytes rounds: times the reciprocal of the block's largest magnitude, to the nearest of the table."""
    n, k = w.shape
    blocks = _blocks(w.float().flatten(), BLOCK)
    absmax = blocks.abs().amax(-1)
    divisor = absmax.clamp_min(TINY)[:, None]
    scaled = (blocks * divisor.reciprocal()).clamp_(-1, 1)
    if n * k % BLOCK:  # it divides in a shorter last block
        scaled[-1] = (blocks[-1] / divisor[-1]).clamp_(-1, 1)
    scaled = scaled.flatten()[: n * k + n * k % 2]
    codes = (nearest_nf4(scaled) if kind == "nf4" else nearest(table_of(kind).to(w.device), scaled)).view(-1, 2)
    packed = (codes[:, :1] << 4) | codes[:, 1:]
    return NF4(packed, nest(absmax) if nested else absmax, (n, k), BLOCK, kind, w.dtype)


def _blocks(flat: Tensor, size: int) -> Tensor:  # [ceil(count / size), size], zeros at the end
    return torch.nn.functional.pad(flat, (0, -flat.numel() % size)).view(-1, size)


def nest(absmax: Tensor) -> Nested:  # [blocks] float32
    """Quantizes scales to 8 bits in blocks of 256 around their mean."""
    offset = absmax.mean()
    blocks = _blocks(absmax - offset, NESTED_BLOCK)
    outer = blocks.abs().amax(-1)
    table = nested_table().to(absmax.device)
    codes = nearest(table, (blocks / outer.clamp_min(TINY)[:, None])).flatten()[: absmax.numel()]
    return Nested(codes.contiguous(), outer, table, float(offset))


def pack(packed: NF4) -> dict[str, Tensor]:
    """The tensors of a bitsandbytes checkpoint, by their names after the layer's."""
    state: dict[str, Any] = {
        "quant_type": packed.kind,
        "blocksize": packed.block,
        "dtype": str(packed.dtype).removeprefix("torch."),
        "shape": list(packed.shape),
    }
    tensors = {"weight": packed.codes, "weight.quant_map": table_of(packed.kind)}
    if isinstance(packed.absmax, Nested):
        nested = packed.absmax
        tensors |= {"weight.absmax": nested.codes, "weight.nested_absmax": nested.absmax}
        tensors["weight.nested_quant_map"] = nested.table
        state |= {"nested_blocksize": nested.block, "nested_dtype": "float32", "nested_offset": nested.offset}
    else:
        tensors["weight.absmax"] = packed.absmax
    tensors[STATE + packed.kind] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return tensors


def unpack(tensors: Tensors) -> NF4:
    """From the tensors of one layer; FormatError where they do not fit together."""
    state = _state(tensors)
    shape, block, kind = state["shape"], state["blocksize"], str(state.get("quant_type"))
    if len(shape) != 2 or kind not in TABLES:
        raise FormatError(f"bitsandbytes weights of type {kind} and shape {list(shape)} are not supported.")
    codes, absmax = need(tensors, "weight", "weight.absmax")
    codes = codes.contiguous().view(torch.uint8).reshape(-1, 1)
    n, k = shape
    scales = _nested(tensors, state) if "nested_offset" in state else absmax.float()
    if codes.numel() != -(-n * k // 2) or absmax.numel() != -(-n * k // block):
        raise FormatError(
            f"A {n} x {k} matrix in blocks of {block} does not match {codes.numel()} bytes and {absmax.numel()} scales."
        )
    _check_table(tensors.get("weight.quant_map"), kind)
    return NF4(codes, scales, (n, k), block, kind, state["dtype"])


def _state(tensors: Tensors) -> dict[str, Any]:
    names = [name for name in tensors if name.startswith(STATE)]
    if not names:
        raise FormatError(f"4-bit weights lack {STATE}nf4, which holds their shape; there are {sorted(tensors)}.")
    try:
        state: dict[str, Any] = json.loads(bytes(tensors[names[0]].tolist()))
        dtype = getattr(torch, state["dtype"])
        return state | {"shape": tuple(map(int, state["shape"])), "blocksize": int(state["blocksize"]), "dtype": dtype}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{names[0]} is not the state that bitsandbytes writes ({error!r}).") from error


def _nested(tensors: Tensors, state: dict[str, Any]) -> Nested:
    codes, absmax, table = need(tensors, "weight.absmax", "weight.nested_absmax", "weight.nested_quant_map")
    block = int(state.get("nested_blocksize", NESTED_BLOCK))
    return Nested(codes, absmax.float(), table.float(), float(state["nested_offset"]), block)


def _check_table(table: Tensor | None, kind: str) -> None:
    if table is not None and not torch.allclose(table.float().cpu(), table_of(kind), rtol=0, atol=1e-4):
        raise FormatError(f"The file's table of values is not {kind}'s.")
