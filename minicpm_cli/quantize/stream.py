"""Hidden states of many rows of tokens, kept off the device between blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from minicpm_cli.model.config import ModelConfig
from minicpm_cli.quantize.block import Layout, Probe, Reached
from minicpm_cli.quantize.layers import Half
from minicpm_cli.quantize.plan import kept_bytes

# Tokens that pass a block at once. CPU: 1024 to 4096 are alike for the demo; CUDA: enough to fill the device.
CPU_TOKENS, CUDA_TOKENS = 2048, 4096
# Above this many bytes the states of a stream lie in a file.
LARGEST = 4 << 30


class Stream:
    """The residual stream of R rows of S tokens between two blocks: [R, S, H] in host memory or a mapped file."""

    def __init__(
        self,
        cfg: ModelConfig,
        ids: Tensor,  # [R, S] int64
        device: torch.device,
        dtype: torch.dtype,
        file: Path | None = None,
    ) -> None:
        self.ids, self._cfg, self._device, self._dtype = ids, cfg, device, dtype
        self._states = _room((*ids.shape, cfg.hidden_size), dtype, device, file)
        self._layouts: dict[int, Layout] = {}

    @property
    def tokens(self) -> int:
        return self.ids.numel()

    def start(self, embed: Callable[[Tensor], Tensor]) -> None:
        """The states before the first block; `embed` maps ids [T] to states [T, H] on any device."""
        for part in self.parts():
            self.put(part, embed(self.ids[part].reshape(-1)))

    def look(self, probe: Probe, half: Half) -> None:
        """Passes the half for its taps' sake alone."""
        for part in self.parts():
            self.run(part, probe, half)

    def pass_half(self, probe: Probe, half: Half) -> None:
        """Moves the states behind the half."""
        for part in self.parts():
            self.put(part, probe.run(half, self.state(part), self._layout(part)))

    def add(self, probe: Probe, half: Half, kept: list[Tensor]) -> None:
        """Moves them there by what the half's last layer read of each part; takes `kept` apart."""
        for part in self.parts():
            self.put(part, probe.add(half, self.state(part), kept.pop(0)))

    def keeps(self, columns: int) -> bool:
        """Whether to keep what a layer of so many inputs reads, to spare a pass: not on a GPU, which computes it again
        sooner than it copies it."""
        return self._device.type == "cpu" and kept_bytes(self.tokens, columns, self._dtype.itemsize) > 0

    def run(self, part: slice, probe: Probe, half: Half) -> Tensor | None:  # [T, H]
        """The states behind the half of some rows, unless a tap ends the pass; they are not moved."""
        try:
            return probe.run(half, self.state(part), self._layout(part))
        except Reached:
            return None

    def row(self, index: int) -> Tensor:  # [S, H] on the device
        return self._states[index].to(self._device)

    def release(self) -> None:
        """Scratch on the device goes; the states stay."""
        self._layouts.clear()

    def parts(self) -> Iterator[slice]:
        """Rows that pass at once."""
        step = rows_at_once(self._device, self.ids.shape[1])
        for start in range(0, len(self.ids), step):
            yield slice(start, min(start + step, len(self.ids)))

    def state(self, part: slice) -> Tensor:  # [T, H] on the device
        return self._states[part].to(self._device, non_blocking=True).flatten(0, 1)

    def put(self, part: slice, h: Tensor) -> None:
        """Without waiting: the host never reads the states, and the device's copies run in their order."""
        self._states[part].copy_(h.view(self._states[part].shape), non_blocking=True)

    def _layout(self, part: slice) -> Layout:
        rows = part.stop - part.start
        if rows not in self._layouts:
            self._layouts[rows] = Layout.of(self._cfg, rows, self.ids.shape[1], self._device, self._dtype)
        return self._layouts[rows]


def rows_at_once(device: torch.device, length: int) -> int:
    return max(1, (CPU_TOKENS if device.type == "cpu" else CUDA_TOKENS) // length)


def state_bytes(rows: int, length: int, hidden: int, dtype: torch.dtype) -> int:
    return rows * length * hidden * dtype.itemsize


def _room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, file: Path | None) -> Tensor:
    count = math.prod(shape)
    if file is not None and count * dtype.itemsize > LARGEST:
        return torch.from_file(str(file), shared=True, size=count, dtype=dtype).view(shape)
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
