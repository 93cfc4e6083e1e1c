"""Which file format each method writes, and how a layer comes back out of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quant.formats import gptq
from quant.rtn import rtn
from quant.scheme import Scheme

Packed = Any  # GroupInt, NF4, Int8 or FP8: each has `dequantize` and `to`
GPTQ_VERSION: gptq.Version = "gptq"


def nearest(weight: Tensor, scheme: Scheme) -> Packed:
    return rtn(weight, scheme)


def to_file(packed: Packed) -> dict[str, Tensor]:
    """A layer's tensors by the ends of their names, in host memory."""
    return gptq.pack(packed.to(torch.device("cpu")), GPTQ_VERSION)


def from_file(tensors: Mapping[str, Tensor], scheme: Scheme) -> Packed:
    return gptq.unpack(dict(tensors), scheme.bits, scheme.group, scheme.symmetric, GPTQ_VERSION)
