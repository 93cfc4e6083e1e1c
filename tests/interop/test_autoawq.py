"""AWQ tensors against AutoAWQ 0.2.9's own packer and reader."""

from __future__ import annotations

import pytest
import torch
from bare_package import bare_import
from torch import Tensor

from quant.formats import awq
from quant.pack import GroupInt
from quant.rtn import rtn
from quant.scheme import Scheme
from steps import relative_error

gemm = bare_import("awq.modules.linear.gemm")
packing = bare_import("awq.utils.packing_utils")

N, K = 96, 256
by_group = pytest.mark.parametrize("group", [32, 64, 128, -1])


def weights() -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(N, K, generator=draw) + 0.7 * torch.randn(N, 1, generator=draw)


def their_layer(packed: GroupInt, group: int) -> torch.nn.Module:
    """Their layer, packed by them from the weights that the codes stand for."""
    linear = torch.nn.Linear(K, N, bias=False)
    linear.weight.data = packed.dequantize()
    _, zero = packed.unsigned()
    scales, zeros = packed.scale.float().T.contiguous(), zero.float().T.contiguous()
    width = K if group == -1 else group  # their packer takes no -1
    return gemm.WQLinear_GEMM.from_linear(linear, 4, width, scales=scales, zeros=zeros)


@by_group
def test_we_read_what_their_packer_writes(group: int) -> None:
    packed = rtn(weights(), Scheme("int", 4, group, symmetric=False))
    tensors = dict(their_layer(packed, group).state_dict())
    assert torch.equal(awq.unpack(tensors, group).dequantize(), packed.dequantize())
    again = awq.pack(packed)
    assert all(torch.equal(again[name], tensors[name]) for name in again)


@by_group
def test_their_reader_computes_our_weights(group: int) -> None:
    packed = rtn(weights(), Scheme("int", 4, group, symmetric=False))
    tensors = awq.pack(packed)
    width = packed.group
    theirs = packing.dequantize_gemm(tensors["qweight"], tensors["qzeros"], tensors["scales"].float(), 4, width)
    assert torch.equal(theirs.T, packed.dequantize())
    assert relative_error(packed.dequantize(), weights()) < 0.2
