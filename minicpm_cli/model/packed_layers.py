"""Which tensors each quantizer stores for a matrix [N, K], of which type and shape, and how they become one matrix."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from minicpm_cli.model.quant_config import Method, QuantConfig
from quant.errors import FormatError
from quant.formats import awq, compressed, fp8, gptq, int8, nf4
from quant.pack import Packed
from quant.scheme import Scheme

Shape = tuple[int, ...]
WORD = 32  # bits of the integers that codes are packed in
INT32, HALVES = (torch.int32,), (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Part:
    """One stored tensor. `shape` None: any; `also`: other shapes that are as good; `hint` explains a wrong one."""

    ending: str
    dtypes: tuple[torch.dtype, ...]
    shape: Shape | None = None
    also: tuple[Shape, ...] = ()
    optional: bool = False
    hint: Callable[[Shape], str] = field(default=lambda found: "")

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return (*self.also, self.shape) if self.shape is not None else self.also


@dataclass(frozen=True, slots=True)
class Layout:
    """How a quantizer stores matrices; only packed ones have a tensor that ends in `mark`."""

    mark: str
    endings: tuple[str, ...]
    parts: Callable[[int, int, Scheme], Sequence[Part]]
    unpack: Callable[[dict[str, Tensor], tuple[int, int], QuantConfig], Packed]
    shape: Callable[[Callable[[str], Tensor], Scheme], Shape]


def _groups(k: int, scheme: Scheme) -> int:
    return -(-k // scheme.width(k))


# ---- GPTQ: codes along K, zero points along N


def _gptq_parts(n: int, k: int, scheme: Scheme) -> list[Part]:
    bits, groups = scheme.bits, _groups(k, scheme)
    return [
        Part("qweight", INT32, (k * bits // WORD, n), hint=lambda found: _other_bits(found[0], k, scheme)),
        Part("qzeros", INT32, (groups, n * bits // WORD), hint=lambda found: _other_group(found[0], k)),
        Part("scales", HALVES, (groups, n), hint=lambda found: _other_group(found[0], k)),
        Part("g_idx", INT32, (k,), optional=not scheme.act_order),
    ]


def _gptq_unpack(tensors: dict[str, Tensor], shape: tuple[int, int], config: QuantConfig) -> Packed:
    scheme, version = config.scheme, config.version or "gptq"
    if scheme.symmetric and not _middle_zeros(tensors["qzeros"], scheme.bits, version):
        raise FormatError(_odd_zeros(tensors["qzeros"], config))
    return gptq.unpack(tensors, scheme.bits, scheme.group, scheme.symmetric, version)


def _middle_zeros(qzeros: Tensor, bits: int, version: str) -> bool:
    """Whether every zero point is 2^(bits-1); the first version of the format stores one less."""
    stored = 2 ** (bits - 1) - (version == "gptq")
    word = sum(stored << i for i in range(0, WORD, bits))
    return bool((qzeros == torch.tensor(word - (1 << WORD) if word >> (WORD - 1) else word, dtype=torch.int32)).all())


def _odd_zeros(qzeros: Tensor, config: QuantConfig) -> str:
    where = f"{config.origin} says symmetric"
    if config.version is None and _middle_zeros(qzeros, config.scheme.bits, "gptq_v2"):
        return f"{where} and no checkpoint_format, and its zero points are those of gptq_v2: give --gptq-format v2"
    return f"{where}, but the zero points are not all the middle one; sym or checkpoint_format there is wrong"


def _other_bits(rows: int, k: int, scheme: Scheme) -> str:
    """Which other setting the number of packed rows would fit."""
    for bits in (2, 3, 4, 8):
        if bits != scheme.bits and rows == k * bits // WORD:
            return f"; by its shape it has {bits} bits, the config says {scheme.bits}"
    padded = -(-k // scheme.width(k)) * scheme.width(k)
    if padded != k and rows == padded * scheme.bits // WORD:
        return f"; its inputs are padded from {k} to {padded} to fill the last group, which is not supported"
    return ""


def _other_group(groups: int, k: int) -> str:
    return f"; by its shape the group is {k // groups}" if groups and k % groups == 0 else ""


def _gptq_shape(raw: Callable[[str], Tensor], scheme: Scheme) -> Shape:
    rows, n = raw("qweight").shape
    return n, rows * WORD // scheme.bits


# ---- AutoAWQ gemm: codes and zero points along N


def _awq_parts(n: int, k: int, scheme: Scheme) -> list[Part]:
    groups, width = _groups(k, scheme), n * scheme.bits // WORD
    return [
        Part("qweight", INT32, (k, width)),
        Part("qzeros", INT32, (groups, width), hint=lambda found: _other_group(found[0], k)),
        Part("scales", HALVES, (groups, n), hint=lambda found: _other_group(found[0], k)),
    ]


def _awq_unpack(tensors: dict[str, Tensor], shape: tuple[int, int], config: QuantConfig) -> Packed:
    return awq.unpack(tensors, config.scheme.group)


def _awq_shape(raw: Callable[[str], Tensor], scheme: Scheme) -> Shape:
    k, width = raw("qweight").shape
    return width * WORD // scheme.bits, k


# ---- compressed-tensors pack-quantized: codes along K, zero points along N


def _packed_parts(n: int, k: int, scheme: Scheme) -> list[Part]:
    bits, groups = scheme.bits, _groups(k, scheme)
    return [
        Part("weight_packed", INT32, (n, -(-k * bits // WORD)), hint=lambda found: _other_bits(found[-1], k, scheme)),
        Part("weight_scale", HALVES, (n, groups), hint=lambda found: _other_group(found[-1], k)),
        Part("weight_shape", (torch.int64, torch.int32), (2,)),
        Part("weight_zero_point", (torch.int32, torch.int8), None, optional=scheme.symmetric),
        Part("weight_g_idx", INT32, (k,), optional=not scheme.act_order),
    ]


def _packed_unpack(tensors: dict[str, Tensor], shape: tuple[int, int], config: QuantConfig) -> Packed:
    stored = tuple(tensors["weight_shape"].tolist())
    if stored != shape:
        raise FormatError(f"weight_shape says {list(stored)}, the model's config {list(shape)}")
    if config.scheme.symmetric and "weight_zero_point" in tensors:
        raise FormatError(f"{config.origin} says symmetric, but there is a weight_zero_point")
    return compressed.unpack(tensors, config.scheme.bits, config.scheme.group)


def _packed_shape(raw: Callable[[str], Tensor], scheme: Scheme) -> Shape:
    return tuple(raw("weight_shape").tolist())


# ---- bitsandbytes: the flat matrix in blocks with a table of 16 values, or rows of int8


def _nf4_parts(kind: str) -> Callable[[int, int, Scheme], Sequence[Part]]:
    bytes_or_floats = (torch.uint8, torch.float32)

    def parts(n: int, k: int, scheme: Scheme) -> list[Part]:
        return [
            Part("weight", (torch.uint8, *HALVES)),  # `bnb_4bit_quant_storage` only names another view of the bytes
            Part("weight.absmax", bytes_or_floats),
            Part("weight.quant_map", (torch.float32,), optional=True),
            Part("weight.nested_absmax", (torch.float32,), optional=True),
            Part("weight.nested_quant_map", (torch.float32,), optional=True),
            Part(f"{nf4.STATE}{kind}", (torch.uint8,)),
        ]

    return parts


def _nf4(kind: str) -> Layout:
    parts, state = _nf4_parts(kind), f"{nf4.STATE}{kind}"
    endings = tuple(part.ending for part in parts(0, 0, Scheme("nf4")))
    return Layout(
        f".{state}",
        endings,
        parts,
        lambda tensors, shape, config: nf4.unpack(tensors),
        lambda raw, scheme: tuple(json.loads(bytes(raw(state).tolist()))["shape"]),
    )


def _int8_parts(n: int, k: int, scheme: Scheme) -> list[Part]:
    return [
        Part("weight", (torch.int8,), (n, k)),
        Part("SCB", HALVES, (n,)),
        Part("weight_format", (torch.uint8,), optional=True),
    ]


def _fp8_parts(n: int, k: int, scheme: Scheme) -> list[Part]:
    return [
        Part("weight", (torch.float8_e4m3fn,), (n, k)),
        Part("weight_scale", HALVES, (n, 1), also=((n,), (1,), ())),
    ]


_FP8 = Layout(
    ".weight_scale",
    ("weight", "weight_scale"),
    _fp8_parts,
    lambda tensors, shape, config: fp8.unpack(tensors),
    lambda raw, scheme: tuple(raw("weight").shape),
)
_INT8 = Layout(
    ".SCB",
    ("weight", "SCB", "weight_format"),
    _int8_parts,
    lambda tensors, shape, config: int8.unpack(tensors),
    lambda raw, scheme: tuple(raw("weight").shape),
)
_GPTQ = Layout(".qweight", ("qweight", "qzeros", "scales", "g_idx"), _gptq_parts, _gptq_unpack, _gptq_shape)
_AWQ = Layout(".qweight", ("qweight", "qzeros", "scales"), _awq_parts, _awq_unpack, _awq_shape)
_PACKED = Layout(
    ".weight_packed",
    ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
    _packed_parts,
    _packed_unpack,
    _packed_shape,
)
_LAYOUTS: Mapping[tuple[Method, str], Layout] = MappingProxyType(
    {
        ("gptq", "int"): _GPTQ,
        ("awq", "int"): _AWQ,
        ("compressed-tensors", "int"): _PACKED,
        ("compressed-tensors", "fp8"): _FP8,
        ("fp8", "fp8"): _FP8,
        ("bitsandbytes", "int8"): _INT8,
        ("bitsandbytes", "nf4"): _nf4("nf4"),
        ("bitsandbytes", "fp4"): _nf4("fp4"),
    }
)


def layout_of(config: QuantConfig) -> Layout:
    return _LAYOUTS[config.method, "fp4" if config.fp4 else config.scheme.kind]
