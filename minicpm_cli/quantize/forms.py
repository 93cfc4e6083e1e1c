"""Which file format each method writes, and how a layer comes back out of it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quant.formats import fp8, gptq, int8, nf4
from quant.formats.int8 import Int8
from quant.formats.nf4 import NF4
from quant.gptq import gptq_solve_all
from quant.hessian import Hessian
from quant.pack import GroupInt, Packed
from quant.rtn import rtn
from quant.scheme import Scheme

GPTQ_VERSION: gptq.Version = "gptq"
COMPUTED = torch.bfloat16  # what bitsandbytes is told to compute in


def nearest(weight: Tensor, scheme: Scheme) -> Packed:  # [N, K]
    """Rounded by its own values alone."""
    packed = rtn(weight, scheme)
    return replace(packed, dtype=COMPUTED) if isinstance(packed, NF4) else packed


def searched(weight: Tensor, scheme: Scheme) -> GroupInt:  # [N, K]
    """Rounded to nearest with each group's scale of least squared error: a solve that knows of no input."""
    return gptq_solve_all([weight], Hessian(weight.shape[1], weight.device), scheme)[0].packed


def to_file(packed: Packed) -> dict[str, Tensor]:
    """A layer's tensors by the ends of their names, in host memory. Raises FormatError."""
    packed = packed.to(torch.device("cpu"))
    if isinstance(packed, GroupInt):
        return gptq.pack(packed, GPTQ_VERSION)
    if isinstance(packed, NF4):
        return nf4.pack(packed)
    return int8.pack(packed) if isinstance(packed, Int8) else fp8.pack(packed)


def from_file(tensors: dict[str, Tensor], scheme: Scheme) -> Packed:
    """What `to_file` was given. Raises FormatError."""
    if scheme.kind == "int":
        return gptq.unpack(tensors, scheme.bits, scheme.group, scheme.symmetric, GPTQ_VERSION)
    if scheme.kind == "nf4":
        return nf4.unpack(tensors)
    return int8.unpack(tensors) if scheme.kind == "int8" else fp8.unpack(tensors)
