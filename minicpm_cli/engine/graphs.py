"""Decode steps on static buffers: forward and sampling for a few numbers of rows, captured as CUDA graphs on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from minicpm_cli.engine.decode_inputs import DecodeLayout
from minicpm_cli.engine.inputs import DrawState, Tensors, penalty_state
from minicpm_cli.engine.penalties import Penalties, PenaltyState
from minicpm_cli.engine.plan import Kind, Plan
from minicpm_cli.kernels.batch import Drafts, ForwardBatch
from minicpm_cli.kernels.capture import captured

FEWEST_DRAFTED = 8  # rows of a step with drafts: each size would need a capture, and kernels of its own for the draws
Forward = Callable[[ForwardBatch, Any], Tensor]
Work = Callable[[], None]
Capture = Callable[[Work], Work]
Results = tuple[Tensor, Tensor]


class Draw(Protocol):
    """Draws on the device: ids [S] int64 and peaks [S] float32, the largest scores, of logits [S, V]; into `out`."""

    def __call__(
        self, logits: Tensor, state: DrawState, penalties: PenaltyState | None, /, *, out: Results | None = None
    ) -> Results: ...

    def greedy(self, logits: Tensor, /, *, out: Results | None = None) -> Results: ...


def padded(count: int, most: int) -> int:
    """Rows of a step of `count` sequences: 1, 2, 4, 8, then in steps of 8 or an eighth of the next power of 2."""
    if count <= 8:
        size = 1 << (count - 1).bit_length()
    else:
        step = max(8, (1 << (count - 1).bit_length()) // 8)
        size = -(-count // step) * step
    return min(size, most)


class DeviceDraw:
    """Leaves a token and the peak of the scores of each row in `ids` and `peaks`, which tell if they are finite."""

    def __init__(self, draw: Draw | None, penalties: Penalties) -> None:
        self.draw, self.penalties = draw, penalties

    def __call__(self, logits: Tensor, kind: Kind, rows: Tensors, ids: Tensor, peaks: Tensor) -> None:  # [S, V]
        if self.draw is None:
            assert kind == "greedy", "the device cannot draw, and was asked to"
            torch.max(logits.float(), -1, out=(peaks, ids))  # the lowest id among equals
            return
        if kind == "greedy":  # 122,753 logits of a row: torch's max takes 36 us of an H200
            self.draw.greedy(logits, out=(ids, peaks))
        else:
            penalties = penalty_state(rows, self.penalties.counts) if kind == "penalised" else None
            self.draw(logits, DrawState.of(rows), penalties, out=(ids, peaks))


class CudaCapture:
    """Turns work on static buffers into a graph's replay. All graphs share one pool, since no two run at once.

    One stream for all captures: cuBLAS keeps a workspace of 32 MB for each stream that it has seen.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, work: Work) -> Work:
        """Work that waits for the device, as quantizers and experts of odd sizes may, stays as it is."""
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            capturable = _runs_ahead(work) or _runs_ahead(work)  # what is compiled or counted at first may wait once
            if not capturable:
                work()
        torch.cuda.current_stream().wait_stream(self._side)
        if not capturable:
            return work
        graph = torch.cuda.CUDAGraph()
        with captured(graph, self._pool, self._side):
            work()
        return graph.replay


def _runs_ahead(work: Work) -> bool:
    """Does the work; False: it stopped where it would have waited for the device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


class Form(NamedTuple):
    """What a captured decode step is made for: so many rows, drawn in such a way, of `sequences` if it has drafts."""

    rows: int
    kind: Kind
    sequences: int = 0

    @classmethod
    def of(cls, plan: Plan, kind: Kind, most: int) -> Form:
        rows = plan.rows
        if not plan.extra:
            return cls(padded(rows, most), kind)
        return cls(padded(max(rows, FEWEST_DRAFTED), most), kind, padded(rows - plan.extra, most))


class DecodeSteps:
    """The device's side of decode steps: one buffer for the inputs of all of them and the tokens they draw."""

    def __init__(
        self,
        layout: DecodeLayout,
        page_size: int,
        device: torch.device,
        run: Callable[[ForwardBatch], Tensor],
        draw: DeviceDraw,
        capture: Capture | None,
    ) -> None:
        self.layout, self.page_size, self.device = layout, page_size, device
        self._run, self._draw, self._capture = run, draw, capture
        self.buffer = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
        self.results = self.buffer[: layout.drawn.stop]
        results = layout.drawn.device(self.buffer)
        self.drawn, self.peaks = results["drawn"], results["peak"]
        self._elements = self.buffer[: layout.nbytes // 8 * 8].view(torch.int64)
        self._rows = torch.arange(layout.rows + 1, dtype=torch.int64, device=device)
        self._starts = self._rows.int()
        self._received: dict[int, Tensor] = {}  # where in the buffer the bytes of a step of so many rows go
        self._captured: dict[Form, Work] = {}
        self.logits: dict[Form, Tensor] = {}  # [rows, V] of the last hosted step of each form, until the next step
        self._scores: dict[Hashable, Tensor] = {}  # where captured steps leave them

    def ready(self, form: Form) -> bool:
        """Whether such a step runs at once: nothing is to be captured."""
        return self._capture is None or form in self._captured

    def launch(self, sent: Tensor, plan: Plan, form: Form) -> None:
        """Runs a plan, padded to the form, on the bytes `sent` by the host; leaves ids and peaks on the device."""
        if self._capture is not None and form not in self._captured:
            self._captured[form] = self._capture_step(self._capture, form)
        self._place(form.rows).copy_(sent, non_blocking=True)
        if self._capture is None:
            padding = (1,) * (form.rows - plan.rows)
            self._step(form, tuple([chunk.start + 1 for chunk in plan.chunks]) + padding)
        else:
            self._captured[form]()

    def _place(self, count: int) -> Tensor:
        if count not in self._received:
            self._received[count] = self.buffer[self.layout.step(count)[1]]
        return self._received[count]

    def rows(self, count: int) -> Tensors:
        """How the rows of a step of so many are drawn, until the next one is launched."""
        return self.layout.step(count)[0].device(self.buffer)

    def take(self, logits: Tensor, kind: Kind, rows: Tensors) -> None:  # [S, V]
        """Draws for the next step, after one of any kind."""
        self._draw(logits, kind, rows, self.drawn[: len(logits)], self.peaks[: len(logits)])

    def _step(self, form: Form, kv_lens: tuple[int, ...] = ()) -> None:
        there = self.rows(form.rows)
        logits = self._run(self._batch(there, form, kv_lens))
        if form.kind != "hosted":
            self.take(logits, form.kind, there)
        else:
            self.logits[form] = logits if self._capture is None else self._moved(logits)

    def _moved(self, logits: Tensor) -> Tensor:
        """To one place for all captured steps, whose own memory is free for the others then."""
        rows = FEWEST_DRAFTED if len(logits) <= FEWEST_DRAFTED else self.layout.rows  # few may be of another type
        key = rows, logits.dtype
        if key not in self._scores:
            self._scores[key] = logits.new_empty(rows, logits.shape[1])
        return self._scores[key][: len(logits)].copy_(logits)

    def _batch(self, there: Tensors, form: Form, kv_lens: tuple[int, ...]) -> ForwardBatch:
        """A captured step may read only the tensors: the host's lengths are those of the moment."""
        count, table = form.rows, self.layout.table.device(self.buffer)["page_table"][: form.rows]
        return ForwardBatch(
            ids=self._elements.index_select(0, there["source"]),
            positions=there["positions"],
            slots=there["slots"],
            q_start=self._starts[: count + 1],
            kv_len=there["kv_len"],
            page_table=table,
            last=self._rows[:count],
            max_q=1,
            max_kv=self.layout.columns * self.page_size,
            page_size=self.page_size,
            q_lens=(1,) * count,
            kv_lens=kv_lens,
            drafts=self._drafts(there["positions"], table, form.sequences) if form.sequences else None,
        )

    def _drafts(self, positions: Tensor, table: Tensor, sequences: int) -> Drafts:
        page = (positions // self.page_size).unsqueeze(1)
        return Drafts(sequences, table.gather(1, page), (positions % self.page_size + 1).int())

    def _capture_step(self, capture: Capture, form: Form) -> Work:
        """Captures over padding alone, which leaves the cache, the tokens in flight and the penalties as they are."""
        kept = self.buffer.clone()
        arrays, span = self.layout.step(form.rows)
        self.buffer[span].zero_()
        there = arrays.device(self.buffer)
        there["kv_len"].fill_(1)
        there["seat"].fill_(-1)
        work = capture(lambda: self._step(form))
        self.buffer.copy_(kept)
        return work
