"""Products of a few rows on the GPU against float64, with what is around them, eager and inside a CUDA graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quant.kernels import gemv, nvrtc
from quant.layers.around import Gate, Norm, around
from quant.layers.cuda_dense import CUDADense
from quant.linear import Linear, make_linear
from quant.pack import GroupInt
from quant.rtn import rtn
from quant.scheme import Scheme
from steps import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]  # many kernels are compiled, and float64 weights multiplied
CUDA = torch.device("cuda")
ROUNDING = {torch.bfloat16: 4e-3, torch.float16: 8e-4}
# Odd rows, a vocabulary's rows, columns that no step divides.
SHAPES = [(288, 576), (1056, 1440), (122753, 256), (37, 96)]
SCHEMES = [
    Scheme("int", 4, 32),
    Scheme("int", 4, 96, symmetric=False),
    Scheme("int", 4, -1),
    Scheme("int", 8, 32, symmetric=False),
    Scheme("int", 8, -1),
]


def weights(n: int, k: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(0)) * 0.02


def inputs(rows: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(rows)).to(CUDA, dtype)


def layer_and_plain(scheme: Scheme | None, n: int, k: int, dtype: torch.dtype) -> tuple[Linear, Tensor]:
    w = weights(n, k)
    if scheme is None:
        return make_linear([w], CUDA, dtype), w.to(dtype).double().to(CUDA)
    packed = rtn(w, scheme.fitted(k))
    return make_linear([packed], CUDA, dtype), packed.dequantize(torch.float64).to(CUDA)


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheme", [None, *SCHEMES], ids=lambda s: s.name if s else "plain")
def test_every_number_of_rows(scheme: Scheme | None, shape: tuple[int, int], dtype: torch.dtype) -> None:
    layer, plain = layer_and_plain(scheme, *shape, dtype)
    assert layer.fused_rows == gemv.MOST_ROWS  # type: ignore[attr-defined]
    for rows in (1, 2, 4, 5, 8, 9, 130):
        x = inputs(rows, shape[1], dtype)
        assert relative_error(layer(x), x.double() @ plain.T) < ROUNDING[dtype]


@pytest.mark.parametrize("gate", [None, Gate("silu"), Gate("relu", 0.05)])
@pytest.mark.parametrize("scheme", [None, SCHEMES[0], SCHEMES[3]], ids=lambda s: s.name if s else "plain")
def test_what_is_around(scheme: Scheme | None, gate: Gate | None) -> None:
    layer, plain = layer_and_plain(scheme, 1056, 576, torch.bfloat16)
    norm = Norm(inputs(1, 576, torch.bfloat16)[0].abs() + 0.1, 1e-5)
    for rows in (1, 3, 8):
        x, onto = inputs(rows, 576, torch.bfloat16), inputs(rows, 528 if gate else 1056, torch.bfloat16)
        y = layer.fused(x, norm, gate, onto, 0.3)  # type: ignore[attr-defined]
        exact = around(lambda v: v.double() @ plain.T, norm(x), None, gate, onto.double(), 0.3)
        settled = torch.ones_like(y, dtype=torch.bool)
        if gate and gate.kind == "relu":  # a gate within rounding of the threshold may fall on either side
            settled = ((norm(x).double() @ plain.T)[:, :528] - gate.threshold).abs() > 0.01
        # The norm's inputs to the product are rounded at another place than the reference rounds them.
        assert relative_error(y[settled], exact[settled]) < 2 * ROUNDING[torch.bfloat16]


def test_a_row_gives_the_same_beside_others() -> None:
    layer, _ = layer_and_plain(SCHEMES[0], 288, 576, torch.bfloat16)
    x = inputs(8, 576, torch.bfloat16)
    together = layer(x)
    assert all(torch.equal(layer(x[i : i + 1]), together[i : i + 1]) for i in range(8))


@pytest.mark.parametrize("broken", [torch.inf, torch.nan])
@pytest.mark.parametrize("scheme", [None, SCHEMES[0], SCHEMES[4]], ids=lambda s: s.name if s else "plain")
def test_a_broken_input_shows_in_its_row_alone(scheme: Scheme | None, broken: float) -> None:
    layer, _ = layer_and_plain(scheme, 288, 576, torch.bfloat16)
    x = inputs(3, 576, torch.bfloat16)
    whole = layer(x)
    x[1, 77] = broken
    y = layer(x)
    assert not y[1].isfinite().any()
    assert torch.equal(y[::2], whole[::2])


def test_unrounded_logits() -> None:
    layer, plain = layer_and_plain(Scheme("int", 8, 64), 1057, 576, torch.bfloat16)
    x = inputs(1, 576, torch.bfloat16)
    y = layer.fused(x, None, None, None, 1.0, float32_out=True)  # type: ignore[attr-defined]
    assert y.dtype == torch.float32
    assert relative_error(y, x.double() @ plain.T) < 1e-4


def test_a_chain_in_a_graph() -> None:
    """Each launch may begin before the one ahead of it has ended: the values must not show it."""
    up, wide = layer_and_plain(SCHEMES[0], 5760, 576, torch.bfloat16)
    down, narrow = layer_and_plain(None, 576, 2880, torch.bfloat16)
    gate, x = Gate("silu"), inputs(1, 576, torch.bfloat16)

    def chain(h: Tensor) -> Tensor:
        for _ in range(6):
            h = down.fused(up.fused(h, None, gate, None, 1.0), None, None, h, 0.5)  # type: ignore[attr-defined]
        return h

    eager = chain(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(x)
    for _ in range(3):
        y.zero_()
        graph.replay()
        assert torch.equal(y, eager)
    exact = x.double()
    for _ in range(6):
        exact = exact + 0.5 * (gate(exact @ wide.T) @ narrow.T)
    assert relative_error(eager, exact) < 5 * ROUNDING[torch.bfloat16]


def test_a_row_of_a_larger_tensor() -> None:
    layer, plain = layer_and_plain(None, 288, 576, torch.bfloat16)
    x = inputs(3, 2 * 576, torch.bfloat16)[:, 576:]
    assert isinstance(layer, CUDADense)
    assert relative_error(layer(x), x.double() @ plain.T) < ROUNDING[torch.bfloat16]


def test_act_order() -> None:
    w = weights(288, 576)
    packed = rtn(w, Scheme("int", 4, 64))
    assert isinstance(packed, GroupInt)
    codes, zero = packed.unsigned()
    order = torch.randperm(576, generator=torch.Generator().manual_seed(2))
    shuffled = GroupInt.from_unsigned(4, 64, codes, packed.scale, zero, order)
    x = inputs(2, 576, torch.bfloat16)
    y = make_linear([shuffled], CUDA, torch.bfloat16)(x)
    assert relative_error(y, x.double() @ shuffled.dequantize(torch.float64).to(CUDA).T) < ROUNDING[torch.bfloat16]


def test_cubins_are_kept(tmp_path: Path) -> None:
    form = gemv.Form(16, half=False, depth=3)
    gemv.kernel(form, CUDA, tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    source, arch = form.source, "sm_{}{}".format(*torch.cuda.get_device_capability())
    nvrtc.load(nvrtc.cached_cubin(source, form.options, arch, tmp_path), "gemv", 1024)
    assert len(file.read_bytes()) == len(whole)
