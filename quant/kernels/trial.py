"""Small products against float64 before a kernel's form is trusted: what a driver or compiler got wrong would be wrong
quietly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from quant.kernels.forms import SCALES
from quant.kernels.layout import MIDDLE, DeviceInt
from quant.kernels.nvrtc import KernelError

BOUND = {torch.bfloat16: 1e-2, torch.float16: 2e-3}  # twice what rounding weights and results leaves


def weight(
    bits: int, scale: int, kind: int, run: int, dtype: torch.dtype, n: int, k: int, device: torch.device
) -> Tensor | DeviceInt:
    """Random [n, k'] of a kernel's kind, k' the next whole number of groups: kind 0 without zero points, 1 with them, 2
    with shifts; `run` times 32 columns share a scale, more than k' of them a whole row."""
    g = torch.Generator().manual_seed(0)
    if bits == 16:
        return torch.randn(n, k, generator=g).to(device, dtype)
    group = min(run * 32, 1 << 13)
    k = -(-k // group) * group if group == run * 32 else -(-k // 32) * 32
    group = min(group, k)
    words = torch.randint(-(2**31), 2**31, (n, k * bits // 32), generator=g, dtype=torch.int64).to(torch.int32)
    types = {number: dtype for dtype, number in SCALES.items()}
    scales = (torch.rand(n, k // group, generator=g) * 0.02 + 0.01).to(types[scale])
    zeros = torch.randint(0, 2**bits, scales.shape, generator=g).to(torch.uint8) if kind == 1 else None
    shifts = -scales.float() * (MIDDLE[bits] + torch.rand(scales.shape, generator=g)) if kind == 2 else None
    parts = (None if part is None else part.to(device) for part in (words, scales, zeros, shifts))
    return DeviceInt(bits, group, *parts)  # type: ignore[arg-type]


def disagreement(
    product: Callable[[Tensor, Tensor | DeviceInt, Tensor], Tensor],
    make: Callable[[], Tensor | DeviceInt],
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """What is wrong with product(x, weight, onto), which should be onto + x @ W^T / 2, in two runs; None: nothing.

    In the capture of a graph nothing can be compared; whoever captures has run it before.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    g = torch.Generator().manual_seed(1)
    try:
        with _waiting_allowed(device):
            weight = make()
            plain = (weight if isinstance(weight, Tensor) else weight.dequantize()).cpu().double()
            x, onto = (torch.randn(rows, size, generator=g).to(dtype) for size in reversed(plain.shape))
            outs = [product(x.to(device), weight, onto.to(device)).cpu().double() for _ in range(2)]
    except KernelError as error:
        return str(error)
    if not torch.equal(*outs):
        return "a product is another at every run"
    ref = onto.double() + x.double() @ plain.T / 2
    off = float((outs[0] - ref).norm() / ref.norm())
    return None if off < BOUND[dtype] else f"a product is off by {off:.1e}"


@contextmanager
def _waiting_allowed(device: torch.device) -> Iterator[None]:
    """Also where a step is tried out for what would wait for the device: a trial comes once."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        if not (mode := torch.cuda.get_sync_debug_mode()):  # setting it warns, even to what it is
            yield
            return
        torch.cuda.set_sync_debug_mode("default")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)
