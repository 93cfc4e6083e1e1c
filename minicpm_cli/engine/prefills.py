"""A prompt for itself, as a chat's turn begins: launching its kernels would take longer than they do to run.

Its tokens are padded to a few sizes, which are captured as decode steps are. Behind them comes a sequence of padding
that lives in the dummy page.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from minicpm_cli.engine.graphs import Capture, DeviceDraw, Work
from minicpm_cli.engine.inputs import StepInputs, fill_draws, step_layout
from minicpm_cli.engine.memory_workspace import PREFILL_GRAPH
from minicpm_cli.engine.pages import DUMMY
from minicpm_cli.engine.plan import Chunk, Kind, kind_of
from minicpm_cli.kernels.batch import ForwardBatch, consecutive, is_fresh

# In tokens. To launch the kernels of one after the other took a host from 13 to 35 ms, in which an H200 computes 1,400
# to 3,600 tokens of the 2B.
SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 1792, PREFILL_GRAPH)


Captured = tuple[int, Kind, bool, bool]  # the size, how it is drawn, are pages consecutive, are all tokens new


class PrefillSteps:
    """Steps of one sequence on static buffers, one for each size."""

    def __init__(
        self,
        columns: int,
        page_size: int,
        device: torch.device,
        run: Callable[[ForwardBatch], Tensor],
        draw: DeviceDraw,
        capture: Capture | None,
    ) -> None:
        self.columns, self.page_size, self.device = columns, page_size, device
        self._run, self._draw, self._capture = run, draw, capture
        self.drawn = torch.zeros(1, dtype=torch.int64, device=device)
        self.peak = torch.zeros(1, dtype=torch.float32, device=device)
        self._buffers: dict[int, Tensor] = {}
        self._seen: set[Captured] = set()
        self._graphs: dict[Captured, Work] = {}

    def size(self, chunk: Chunk) -> int:
        """How many tokens a chunk is padded to; 0: it is none of these steps."""
        if chunk.size > SIZES[-1] or chunk.seq.penalised:
            return 0
        size = next(size for size in SIZES if size >= chunk.size)
        return size if size - chunk.size <= self.columns * self.page_size else 0

    def launch(self, host: StepInputs, size: int, kind: Kind) -> None:
        """Leaves what is drawn in `drawn` and `peak`. A size is captured when it comes again: once would not pay."""
        if size not in self._buffers:
            self._buffers[size] = torch.empty(host.layout.stop, dtype=torch.uint8, device=self.device)
        self._buffers[size].copy_(host.buffer, non_blocking=True)
        key = (size, kind, consecutive(host.runs), is_fresh(host.q_lens, host.kv_lens))
        if key not in self._graphs:
            if self._capture is None or key not in self._seen:
                self._seen.add(key)
                self._step(host, size, kind)
                return
            self._graphs[key] = self._capture(lambda: self._step(host, size, kind))
        self._graphs[key]()

    def _step(self, host: StepInputs, size: int, kind: Kind) -> None:
        there = host.layout.device(self._buffers[size])
        self._draw(self._run(host.batch(there)), kind, there, self.drawn, self.peak)

    def build(self, chunk: Chunk, size: int, *, pinned: bool) -> StepInputs:
        """The chunk, then the padding; of that nothing is sampled. Nobody reads what an unsampled chunk draws.

        The padding stores to the dummy page. Where pages are consecutive it reads on behind that, whatever is there.
        """
        seq, start, count, _ = chunk
        rest = size - count
        layout = step_layout(size, 2, 1, self.columns)
        buffer = torch.empty(layout.stop, dtype=torch.uint8, pin_memory=pinned)
        host = layout.host(buffer)
        host["ids"][:count], host["ids"][count:] = np.frombuffer(seq.tokens, np.int32, count, start * 4), 0
        positions, slots, table = host["positions"], host["slots"], host["page_table"]
        positions[:count], positions[count:] = np.arange(start, start + count), np.arange(rest)
        table[:], table[0, : len(seq.pages)] = DUMMY, np.frombuffer(seq.pages, np.int32)
        page, offset = np.divmod(positions, self.page_size)
        slots[:count] = table[0, page[:count]].astype(np.int64) * self.page_size + offset[:count]
        slots[count:] = DUMMY * self.page_size + offset[count:]
        kv_lens = start + count, max(rest, 1)
        host["q_start"][:], host["kv_len"][:], host["last"][:] = (0, count, size), kv_lens, count - 1
        if kind_of((seq,)) != "greedy":
            fill_draws(host, [seq], self._draw.penalties)
        return StepInputs(layout, buffer, self.page_size, (count, rest), kv_lens, (seq.run, DUMMY))
