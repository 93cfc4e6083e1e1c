"""Engines that lag a step on the CPU: work queued as on a GPU, steps replayed as graphs are, draws on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from fake_decoder import FakeDecoder
from torch import Tensor

from minicpm_cli.engine.draws import uniforms
from minicpm_cli.engine.engine import Engine, EngineConfig
from minicpm_cli.engine.inputs import DrawState
from minicpm_cli.engine.penalties import PenaltyState
from minicpm_cli.engine.sampler import Rows, sample, settle
from minicpm_cli.kernels.batch import ForwardBatch

WAYS = ("lagged", "queued", "replayed", "in step")


class Draws:
    """What the engine's own sampler draws, from the device's arrays alone."""

    def __call__(
        self,
        logits: Tensor,
        state: DrawState,
        penalties: PenaltyState | None = None,
        *,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        if penalties is not None:
            logits = penalised(logits, penalties)
        cold = state.temperature == 0
        rows = Rows(
            greedy=cold.nonzero().flatten().tolist(),
            plain=[],
            filtered=(~cold).nonzero().flatten().tolist(),
            uniform=torch.from_numpy(uniforms(state.seed.numpy().view(np.uint64), state.index.numpy())),
            temperature=state.temperature,
            top_p=state.top_p,
            floor=state.min_p.log(),
            top_k=state.top_k.long(),
            largest_k=int(state.top_k.max()),
        )
        drawn = sample(logits, rows)
        ids = settle(drawn, logits, rows)[2]
        if penalties is not None:
            for seat, token in zip(penalties.seat.tolist(), ids.tolist(), strict=True):
                if seat >= 0:
                    penalties.counts[seat, token] += 2
        return into(out, ids, drawn.peak)

    def greedy(self, logits: Tensor, *, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        return into(out, logits.argmax(-1), logits.amax(-1))


def into(out: tuple[Tensor, Tensor] | None, *results: Tensor) -> tuple[Tensor, Tensor]:
    for place, result in zip(out or (), results, strict=bool(out)):
        place.copy_(result)
    return results[0], results[1]


def penalised(logits: Tensor, penalties: PenaltyState) -> Tensor:
    out = logits.clone()
    for row, seat in enumerate(penalties.seat.tolist()):
        if seat >= 0:
            counts, divisor = penalties.counts[seat], penalties.repetition[row]
            changed = torch.where(logits[row] > 0, logits[row] / divisor, logits[row] * divisor)
            out[row] = torch.where(counts > 0, changed, logits[row])
            out[row] -= (counts // 2) * penalties.frequency[row] + (counts > 1) * penalties.presence[row]
    return out


class PaddedFake(FakeDecoder):
    """Reads the device's tensors alone, as a captured step does; rows on the dummy page are padding."""

    def forward(self, batch: ForwardBatch, kv: object) -> Tensor:
        if len(batch.kv_len) == 2 and len(batch.last) == 1 and batch.page_table[1].sum() == 0:
            return self._alone(batch, kv)
        if batch.max_q > 1 or batch.runs:
            return super().forward(batch, kv)
        real = batch.slots >= self.page_size
        used = int(real.sum())
        assert real[:used].all(), "padding comes last"
        assert (batch.kv_len[used:] == 1).all()
        assert (batch.page_table[used:, 0] == 0).all()
        lengths = tuple(batch.kv_len[:used].tolist())
        assert batch.kv_lens[:used] in ((), lengths)
        if not used:
            return torch.zeros(len(real), self.vocab)
        self._check_rows(batch, used)
        stripped = replace(
            batch,
            ids=batch.ids[:used],
            positions=batch.positions[:used],
            slots=batch.slots[:used],
            q_start=batch.q_start[: used + 1],
            kv_len=batch.kv_len[:used],
            page_table=batch.page_table[:used],
            last=batch.last[:used],
            max_kv=max(lengths),
            q_lens=(1,) * used,
            kv_lens=lengths,
            runs=(-1,) * used,
        )
        logits = super().forward(stripped, kv)
        return torch.cat([logits, torch.zeros(len(real) - used, self.vocab)])

    def _check_rows(self, batch: ForwardBatch, used: int) -> None:
        """No row reads what another stores, unless the batch says so."""
        written, drafts = batch.slots[:used] // self.page_size, batch.drafts
        read = [
            table[: -(-length // self.page_size)].tolist()
            for table, length in zip(batch.page_table, batch.kv_len, strict=True)
        ]
        shared = [i for i in range(used) for j in range(used) if i != j and int(written[i]) in read[j]]
        assert bool(shared) <= (drafts is not None)
        if drafts is not None:
            assert len({table[0] for table in read[:used]}) <= drafts.sequences
            assert drafts.page[:used, 0].tolist() == written.tolist()
            assert drafts.filled[:used].tolist() == (batch.slots[:used] % self.page_size + 1).tolist()

    def _alone(self, batch: ForwardBatch, kv: object) -> Tensor:
        """One sequence, and one of padding behind it."""
        count, length, padding = int(batch.q_start[1]), int(batch.kv_len[0]), len(batch.ids) - int(batch.q_start[1])
        assert batch.positions[count:].tolist() == list(range(padding))
        assert (batch.slots[count:] == batch.positions[count:] % self.page_size).all()
        assert batch.q_start.tolist() == [0, count, len(batch.ids)]
        assert int(batch.kv_len[1]) == max(padding, 1)
        stripped = replace(
            batch,
            ids=batch.ids[:count],
            positions=batch.positions[:count],
            slots=batch.slots[:count],
            q_start=batch.q_start[:2],
            kv_len=batch.kv_len[:1],
            page_table=batch.page_table[:1],
            max_q=count,
            max_kv=length,
            q_lens=(count,),
            kv_lens=(length,),
            runs=(-1,),
        )
        return super().forward(stripped, kv)


class Queue:
    """A device that computes nothing before somebody waits for it."""

    def __init__(self) -> None:
        self.works: list[Callable[[], None]] = []
        self.longest = 0

    def submit(self, work: Callable[[], None]) -> Mark:
        self.works.append(work)
        self.longest = max(self.longest, len(self.works))
        return Mark(self, work)

    def run_until(self, work: Callable[[], None]) -> None:
        while work in self.works:
            with torch.inference_mode():
                self.works.pop(0)()


class Mark:
    def __init__(self, queue: Queue, work: Callable[[], None]) -> None:
        self._queue, self._work = queue, work

    def synchronize(self) -> None:
        self._queue.run_until(self._work)


def replayed(work: Callable[[], None]) -> Callable[[], None]:
    """A graph of the work: run once to warm up, then always as it was recorded."""
    work()
    return work


def lagged_engine(
    way: str, pages: int = 200, page_size: int = 4, alike_rows: int | None = None, **options: Any
) -> tuple[Engine, FakeDecoder]:
    decoder = PaddedFake(pages, page_size)
    decoder.alike_rows = alike_rows
    sizes = {"max_seqs": 8, "max_batch_tokens": 64, "context": 400} | options
    config = EngineConfig(pages=pages, page_size=page_size, lag=True, **sizes)
    engine = Engine(decoder, None, config, draw=Draws())
    pipeline = engine.runner.pipeline
    assert pipeline is not None
    if way in ("queued", "replayed"):
        pipeline.submit = Queue().submit
    if way == "replayed":
        pipeline.steps._capture = replayed
    if way == "in step":
        engine._lag = False
    return engine, decoder
