"""A mixture of experts in one go against its definition, token by token in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from quant.kernels.layout import DeviceInt
from quant.kernels.moe import fits, moe_forward, route
from quant.layers.around import Gate
from quant.scheme import ROW

BF16, F16 = torch.bfloat16, torch.float16
# Activations between the products are rounded to the inputs' type; the interpreter cuts bfloat16 off instead, five
# times on the way, always towards zero.
BOUND = {("cuda", BF16): 1e-2, ("cpu", BF16): 4e-2, ("cuda", F16): 2e-3, ("cpu", F16): 2e-3}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(e: int, n: int, k: int, bits: int, group: int, zero: bool, device: str) -> DeviceInt:
    g = torch.Generator().manual_seed(n)
    words = torch.randint(-(2**31), 2**31, (e * n, k * bits // 32), generator=g, dtype=torch.int64).to(torch.int32)
    scale = ((torch.rand(e * n, k // group, generator=g) * 0.02 + 0.01) / 2 ** (bits - 4)).to(F16)
    zeros = torch.randint(0, 2**bits, scale.shape, generator=g).to(torch.uint8).to(device) if zero else None
    return DeviceInt(bits, group, words.to(device), scale.to(device), zeros, None)


def reference(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, active: int, gate: Gate) -> Tensor:
    """[T, H] float64 of weights [E, 2I, H] and [E, H, I]."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for t, row in enumerate(logits.double()):
        shares, chosen = row.softmax(0).topk(active)
        for share, e in zip(shares / shares.sum(), chosen.tolist(), strict=True):
            hidden = gate((gate_up[e].double() @ x[t].double())[None])[0]
            out[t] += share * (down[e].double() @ hidden)
    return out


def error(out: Tensor, ref: Tensor) -> float:
    return float((out.double() - ref).norm() / ref.norm())


@pytest.mark.parametrize(
    ("tokens", "experts", "active", "h", "i", "gate", "dtype"),
    [
        (1, 8, 2, 96, 136, Gate("silu"), BF16),
        (70, 3, 2, 72, 88, Gate("relu", 0.1), BF16),
        (5, 5, 1, 64, 64, Gate("silu"), F16),
    ],
)
def test_plain_experts(tokens, experts, active, h, i, gate, dtype, kernel_device):
    x, logits = draw(tokens, h, seed=1).to(dtype), draw(tokens, experts, seed=2)
    gate_up, down = draw(experts, 2 * i, h, seed=3).to(dtype), (draw(experts, h, i, seed=4) / 8).to(dtype)
    ref = reference(x, logits, gate_up, down, active, gate)
    assert fits(gate_up, down, dtype)
    out = moe_forward(*(t.to(kernel_device) for t in (x, logits, gate_up, down)), active, gate)
    assert error(out.cpu(), ref) < BOUND[kernel_device, dtype]


@pytest.mark.parametrize(
    ("tokens", "bits", "group", "zero", "dtype"),
    [
        (1, 4, 64, False, BF16),
        (20, 4, 32, True, BF16),
        (6, 8, 64, False, F16),
        (5, 8, ROW, False, BF16),
        (150, 8, ROW, False, BF16),
        (150, 8, ROW, True, F16),
        (150, 4, ROW, False, F16),
        (150, 4, 64, False, BF16),
    ],
)
def test_packed_experts(tokens, bits, group, zero, dtype, kernel_device):
    h, i, experts = 128, 192, 3
    gate_up, down = (
        packed(experts, n, k, bits, k if group == ROW else group, zero, kernel_device) for n, k in ((2 * i, h), (h, i))
    )
    x, logits = draw(tokens, h, seed=1).to(dtype), draw(tokens, experts, seed=2)
    plain = (w.dequantize(torch.float64).cpu() for w in (gate_up, down))
    gate_up64, down64 = (w.view(experts, -1, w.shape[1]) for w in plain)
    ref = reference(x, logits, gate_up64, down64, 2, Gate("silu"))
    assert fits(gate_up, down, dtype)
    out, again = (
        moe_forward(x.to(kernel_device), logits.to(kernel_device), gate_up, down, 2, Gate("silu")) for _ in range(2)
    )
    assert torch.equal(out, again)
    assert error(out.cpu(), ref) < BOUND[kernel_device, dtype]


@pytest.mark.parametrize("tokens", [1, 3, 150])
def test_routing_sorts_by_expert_and_keeps_the_order_of_tokens(tokens, kernel_device):
    logits = draw(tokens, 6, seed=5)
    routing = route(logits.to(kernel_device), 2)
    shares, chosen = logits.softmax(-1).topk(2)
    torch.testing.assert_close(routing.shares.cpu(), shares / shares.sum(-1, keepdim=True))
    order = chosen.flatten().argsort(stable=True)
    assert torch.equal(routing.order.cpu().long(), order)
    assert torch.equal(routing.places.cpu().long(), order.argsort())
    counts = torch.bincount(chosen.flatten(), minlength=6)
    assert torch.equal(routing.starts.cpu().long(), torch.cat((torch.zeros(1).long(), counts.cumsum(0))))


def test_an_expert_nobody_chose_is_not_read(kernel_device):
    x, logits = draw(2, 64, seed=1).to(BF16), torch.tensor([[2.0, 1.0, -9.0], [1.0, 2.0, -9.0]])
    gate_up, down = draw(3, 128, 64, seed=3).to(BF16), draw(3, 64, 64, seed=4).to(BF16)
    gate_up[2], down[2] = float("nan"), float("nan")
    out = moe_forward(*(t.to(kernel_device) for t in (x, logits, gate_up, down)), 2, Gate("silu"))
    assert out.isfinite().all()


def test_rows_that_the_copy_engine_cannot_read_do_not_fit():
    assert not fits(torch.zeros(2, 8, 12, dtype=BF16), torch.zeros(2, 12, 4, dtype=BF16), BF16)
    assert not fits(torch.zeros(2, 8, 16), torch.zeros(2, 16, 8), torch.float32)
