"""Runs a decoder on whole sequences in tests: builds the forward batch of a step by the plainest means."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from minicpm_cli.kernels.batch import ForwardBatch
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.decoder import Decoder
from minicpm_cli.model.kv import KVCache
from minicpm_cli.model.kv_format import KVFormat
from minicpm_cli.model.loader import build_decoder

# Compiled once for all tests and runs: a GPU's kernels take seconds each.
KERNELS = Path(tempfile.gettempdir()) / "minicpm-test-kernels"


class DictSource:
    """A TensorSource over tensors in memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors, self.open = tensors, set(tensors)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def names(self) -> set[str]:
        return set(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        assert self.shape(name) == tuple(shape), (name, self.shape(name), shape)
        self.open.remove(name)
        return self.tensors[name]

    def ignore(self, name: str) -> None:
        self.open.remove(name)

    def finish(self) -> None:
        assert not self.open, self.open


def decoder_of(
    cfg: ModelConfig,
    tensors: dict[str, Tensor],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Decoder:
    return build_decoder(DictSource(tensors), cfg, torch.device(device), dtype, kernels=KERNELS)


def forward_batch(
    runs: list[tuple[list[int], int]], tables: list[list[int]], page_size: int, device: torch.device
) -> ForwardBatch:
    """A step that adds tokens to sequences: `runs` are (new tokens, tokens before), `tables` their pages."""
    ids = [t for new, _ in runs for t in new]
    positions = [before + i for new, before in runs for i in range(len(new))]
    slots = [
        tables[b][(before + i) // page_size] * page_size + (before + i) % page_size
        for b, (new, before) in enumerate(runs)
        for i in range(len(new))
    ]
    q_lens = tuple(len(new) for new, _ in runs)
    kv_lens = tuple(before + len(new) for new, before in runs)
    starts = [sum(q_lens[:i]) for i in range(len(q_lens) + 1)]
    width = max(map(len, tables))

    def tensor(values: object, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return ForwardBatch(
        ids=tensor(ids, torch.int64),
        positions=tensor(positions, torch.int64),
        slots=tensor(slots, torch.int64),
        q_start=tensor(starts, torch.int32),
        kv_len=tensor(kv_lens, torch.int32),
        page_table=tensor([t + [0] * (width - len(t)) for t in tables], torch.int32),
        last=tensor([s - 1 for s in starts[1:]], torch.int64),
        max_q=max(q_lens),
        max_kv=max(kv_lens),
        page_size=page_size,
        q_lens=q_lens,
        kv_lens=kv_lens,
        runs=tuple(t[0] if t == list(range(t[0], t[0] + len(t))) else -1 for t in tables),
    )


def all_logits(
    decoder: Decoder,
    ids: list[int],
    chunks: list[int] | None = None,
    page_size: int = 4,
    kv_format: KVFormat | None = None,
) -> Tensor:
    """Logits [T, V] of one sequence, computed in steps of the given sizes over shuffled pages."""
    pages = -(-len(ids) // page_size)
    table = (torch.randperm(pages, generator=torch.Generator().manual_seed(1)) + 1).tolist()
    kv = KVCache.allocate(decoder.cfg, pages + 1, page_size, decoder.device, decoder.dtype, kv_format)
    rows, before = [], 0
    with torch.inference_mode():
        for size in chunks or [len(ids)]:
            batch = forward_batch([(ids[before : before + size], before)], [table], page_size, decoder.device)
            rows.append(decoder.logits(decoder.hidden(batch, kv)))
            before += size
    assert before == len(ids)
    return torch.cat(rows)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.double().cpu(), expected.double().cpu()
    return float((actual - expected).norm() / expected.norm())
