"""Every packing's layer on CUDA against float64, alone and inside a CUDA graph."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from quant.embedding import Embedding
from quant.formats import fp8, nf4
from quant.layers.fp8 import CAPABILITY, ScaledFP8
from quant.layers.int8 import BitsAndBytes8
from quant.layers.nf4 import BitsAndBytes4
from quant.linear import Gathered, Joined, Linear, Unpacking, make_linear
from quant.pack import GroupInt, Packed
from quant.rtn import rtn
from quant.scheme import Scheme
from steps import relative_error

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# The inputs are rounded too: to 8 bits of the row's largest (int8), to 3 bits of mantissa (fp8).
INPUT_ERROR = {"int8": 0.02, "fp8": 0.04}
ROUNDING = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5}


@dataclass(frozen=True)
class Case:
    name: str
    packed: Packed
    kind: str = "int"

    def error_bound(self, dtype: torch.dtype) -> float:
        return ROUNDING[dtype] + INPUT_ERROR.get(self.kind, 0.0)


def weights(n: int, k: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(0)) * 0.02


def shuffled(packed: Packed) -> GroupInt:
    assert isinstance(packed, GroupInt)
    codes, zero = packed.unsigned()
    order = torch.randperm(packed.shape[1], generator=torch.Generator().manual_seed(2))
    return GroupInt.from_unsigned(packed.bits, packed.group, codes, packed.scale, zero, order)


def cases(n: int, k: int) -> list[Case]:
    w = weights(n, k)
    found = [
        Case(s.name, rtn(w, s), s.kind)
        for s in (
            Scheme("int", 4, 32),
            Scheme("int", 4, 96, symmetric=False),
            Scheme("int", 8, -1),
            Scheme("int", 8, 64, symmetric=False),
            Scheme("nf4"),
            Scheme("int8"),
            Scheme("fp8"),
        )
    ]
    found.append(Case("act-order", shuffled(found[1].packed)))
    found += [Case(f"nested {kind}", nf4.quantize(w, kind=kind, nested=True), kind) for kind in ("nf4", "fp4")]
    return found


ODD = cases(577, 576)
ROUND = cases(288, 576)


def on_gpu(case: Case, dtype: torch.dtype = torch.bfloat16) -> Linear:
    return make_linear([case.packed], torch.device("cuda"), dtype)


def inputs(rows: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(1)).to("cuda", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 17, 300])
@pytest.mark.parametrize("case", ODD + ROUND, ids=lambda c: f"{c.name}-{c.packed.shape[0]}")
def test_layers(case: Case, rows: int, dtype: torch.dtype) -> None:
    layer, x = on_gpu(case, dtype), inputs(rows, 576, dtype)
    y = layer(x)
    assert (y.shape, y.dtype, y.device.type) == ((rows, case.packed.shape[0]), dtype, "cuda")
    plain = case.packed.dequantize(torch.float64)
    bound = case.error_bound(torch.bfloat16 if case.kind == "fp8" else torch.float16 if case.kind == "int8" else dtype)
    assert relative_error(y, x.cpu().double() @ plain.T) < bound
    assert relative_error(layer.dequantize(), plain) < ROUNDING[dtype]


@pytest.mark.parametrize(
    "case", [c for c in ODD + ROUND if c.kind != "int8"], ids=lambda c: f"{c.name}-{c.packed.shape[0]}"
)
@pytest.mark.parametrize("rows", [1, 5])
def test_layers_in_a_graph(case: Case, rows: int) -> None:
    """All but LLM.int8, which looks for outliers on the host."""
    layer, x = on_gpu(case), inputs(rows, 576, torch.bfloat16)
    expected = layer(x)
    static = torch.zeros_like(x)
    layer(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(static)
    static.copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    assert relative_error(y, expected) < 1e-3


def test_which_layer_runs() -> None:
    layers = {c.name: on_gpu(c) for c in ROUND}
    assert isinstance(layers["nf4"], BitsAndBytes4)
    assert isinstance(layers["nested fp4"], BitsAndBytes4)
    assert isinstance(layers["int8"], BitsAndBytes8)
    assert isinstance(layers["act-order"], Gathered)
    scaled = torch.cuda.get_device_capability() >= CAPABILITY
    assert isinstance(layers["fp8"], ScaledFP8 if scaled else Unpacking)


def test_blocks_of_nf4_that_run_across_rows() -> None:
    packed = nf4.quantize(weights(64, 96))
    layer = make_linear([packed], torch.device("cuda"), torch.bfloat16)
    x = inputs(3, 96, torch.bfloat16)
    assert relative_error(layer(x), x.cpu().double() @ packed.dequantize(torch.float64).T) < 5e-3


def test_bitsandbytes_gives_the_same_weights_on_cuda() -> None:
    import bitsandbytes.functional as bnb

    w = weights(288, 576).bfloat16().cuda()
    codes, state = bnb.quantize_4bit(w, blocksize=64, quant_type="nf4")
    mine = nf4.quantize(w)
    assert torch.equal(mine.codes, codes)
    assert torch.equal(mine.scales, state.absmax)
    assert torch.equal(mine.dequantize(torch.bfloat16), bnb.dequantize_4bit(codes, state))


def test_fp8_rounds_as_on_the_cpu() -> None:
    x = weights(33, 576)
    codes, scale = fp8.quantize(x)
    theirs, their_scale = fp8.quantize(x.cuda())
    assert torch.equal(theirs.cpu().view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(their_scale.cpu(), scale)


@pytest.mark.parametrize("kind", ["int", "nf4", "int8", "fp8"])
def test_round_to_nearest_on_cuda_is_the_cpu_s(kind: str) -> None:
    w, scheme = weights(100, 576), Scheme(kind, group=64)
    assert relative_error(rtn(w.cuda(), scheme).dequantize(), rtn(w, scheme).dequantize()) < 1e-6


def test_parts_with_different_orders() -> None:
    parts = [c.packed for c in ROUND if c.name == "act-order"] + [ROUND[0].packed]
    layer = make_linear(parts, torch.device("cuda"), torch.bfloat16)
    assert isinstance(layer, Joined)
    x = inputs(3, 576, torch.bfloat16)
    plain = torch.cat([p.dequantize(torch.float64) for p in parts])
    assert relative_error(layer(x), x.cpu().double() @ plain.T) < 5e-3


@pytest.mark.parametrize("case", ROUND, ids=lambda c: c.name)
def test_embedding(case: Case) -> None:
    ids = torch.tensor([3, 3, 287, 0])
    table = case.packed.dequantize()
    rows = Embedding(case.packed, torch.device("cuda"), torch.float32)(ids.cuda())
    assert relative_error(rows, table[ids]) < 1e-6
