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


def packed(e: int, n: int, k: int, bits: int, group: int, kind: str, device: str) -> DeviceInt:
    """Kind: sym, zero or shift."""
    g = torch.Generator().manual_seed(n)
    words = torch.randint(-(2**31), 2**31, (e * n, k * bits // 32), generator=g, dtype=torch.int64).to(torch.int32)
    scale = ((torch.rand(e * n, k // group, generator=g) * 0.02 + 0.01) / 2 ** (bits - 4)).to(F16)
    zero = torch.randint(0, 2**bits, scale.shape, generator=g).to(torch.uint8) if kind == "zero" else None
    shift = -scale.float() * (2 ** (bits - 1) + torch.rand(scale.shape, generator=g)) if kind == "shift" else None
    parts = (None if t is None else t.to(device) for t in (words, scale, zero, shift))
    return DeviceInt(bits, group, *parts)


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
    ("tokens", "bits", "group", "kind", "dtype"),
    [
        (1, 4, 32, "sym", BF16),
        (20, 4, 32, "zero", BF16),
        (6, 8, 96, "sym", F16),
        (5, 8, ROW, "sym", BF16),
        (70, 4, 96, "shift", BF16),
        (70, 8, 32, "shift", F16),
        (70, 8, 96, "zero", BF16),
        (150, 8, ROW, "sym", BF16),
        (150, 8, ROW, "zero", F16),
        (150, 4, ROW, "sym", F16),
        (150, 4, 96, "zero", BF16),
    ],
)
def test_packed_experts(tokens, bits, group, kind, dtype, kernel_device):
    check_packed(tokens, 3, 96, 192, bits, group, kind, dtype, kernel_device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("kind", ["sym", "zero", "shift"])
@pytest.mark.parametrize(("bits", "group"), [(4, 64), (4, 256), (4, ROW), (8, 128), (8, ROW)])
def test_packed_experts_of_many_tokens(bits, group, kind, dtype):
    for tokens in (130, 400):
        check_packed(tokens, 4, 768, 1024, bits, group, kind, dtype, "cuda")


def check_packed(tokens, experts, h, i, bits, group, kind, dtype, device):
    """Against the definition, and the same at every call."""
    gate_up, down = (
        packed(experts, n, k, bits, k if group == ROW else group, kind, device) for n, k in ((2 * i, h), (h, i))
    )
    x, logits = draw(tokens, h, seed=1).to(dtype) / 4, draw(tokens, experts, seed=2)
    gate_up64, down64 = (w.dequantize(torch.float64).cpu().view(experts, -1, w.K) for w in (gate_up, down))
    ref = reference(x, logits, gate_up64, down64, 2, Gate("silu"))
    assert fits(gate_up, down, dtype)
    first, *others = (moe_forward(x.to(device), logits.to(device), gate_up, down, 2, Gate("silu")) for _ in range(4))
    assert all(torch.equal(out, first) for out in others)
    assert error(first.cpu(), ref) < BOUND[device, dtype]


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
