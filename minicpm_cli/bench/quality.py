"""How well a model predicts a text, and how far its predictions are from another model's: perplexity, KL, agreement.

Logits live for one chunk of positions at a time; only sums are kept, so that memory does not grow with the text.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from minicpm_cli.errors import MinicpmError, UsageError
from minicpm_cli.kernels.batch import ForwardBatch
from minicpm_cli.model.decoder import Decoder
from minicpm_cli.model.kv import KVCache
from minicpm_cli.model.kv_format import KVFormat

STEP = 2048  # tokens that pass the blocks at once
PAGE = 16
LOGIT_BYTES = 64 << 20  # of one chunk of float32 logits
LARGEST = 700.0  # nats a token; exp of more does not fit a float

Progress = Callable[[int, int], None]  # (windows done, windows)


@dataclass(frozen=True, slots=True)
class Window:
    """Token ids read at once; those from index `first` (at least 1) on are predicted from all before them."""

    ids: tuple[int, ...]
    first: int = 1

    @property
    def predicted(self) -> tuple[int, ...]:
        return self.ids[self.first :]


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp of the mean negative log-likelihood over `tokens` predicted tokens."""

    value: float
    tokens: int

    @classmethod
    def of(cls, nll: float, tokens: int) -> Perplexity:
        return cls(math.exp(min(nll / tokens, LARGEST)), tokens)


@dataclass(frozen=True, slots=True)
class Comparison:
    """`kl` is the mean KL(reference || model) in nats, `top1` the part of positions with the same likeliest token."""

    ppl: float
    ref_ppl: float
    kl: float
    top1: float
    tokens: int


class Predictor(Protocol):
    """What predicts windows: the states of the predicted positions, and their logits, a few rows at a time."""

    @property
    def vocab(self) -> int: ...
    def states(self, window: Window) -> Tensor: ...  # [P, H]
    def logits(self, states: Tensor) -> Tensor: ...  # [R, H] -> [R, V] float32


def windows(ids: Sequence[int], size: int, stride: int, bos: int | None = None) -> list[Window]:
    """Sliding windows over a text: each token is predicted once, with at least `size - stride` tokens before it.

    The first window predicts all it can. Without `bos` a token with nothing before it in its window is not predicted:
    the text's first, and each window's first where stride = size. With `bos` each window begins with it, as one of its
    `size` tokens. Raises UsageError for a stride that leaves tokens out, or a text without a token to predict.
    """
    prefix = () if bos is None else (bos,)
    room = size - len(prefix)
    if not 1 <= stride <= room or size < 2:
        raise UsageError(f"a stride of {stride} does not fit windows of {size}: it must be from 1 to {max(room, 1)}")
    found, done = [], 0
    for begin in range(0, len(ids), stride):
        end = min(begin + room, len(ids))
        window = Window((*prefix, *ids[begin:end]), max(done - begin + len(prefix), 1))
        done = end
        if window.predicted:
            found.append(window)
        if end == len(ids):
            break
    if not found:
        raise UsageError(f"the text is too short: {len(ids)} tokens, and at least {2 - len(prefix)} are needed")
    return found


def perplexity(model: Predictor, windows: Sequence[Window], on_progress: Progress | None = None) -> Perplexity:
    """Of all predicted tokens together. Raises MinicpmError for scores that are not finite."""
    nll, tokens = 0.0, 0
    for window in _counted(windows, on_progress):
        for rows, targets in _chunks(model.vocab, window, model.states(window)):
            nll += float(_nll(_log_probs(model, rows), targets))
            tokens += len(targets)
    return Perplexity.of(nll, tokens)


def compare(
    model: Predictor, reference: Predictor, windows: Sequence[Window], on_progress: Progress | None = None
) -> Comparison:
    """Both perplexities, and how far the predictions differ. Raises UsageError for different vocabularies."""
    if model.vocab != reference.vocab:
        raise UsageError(
            f"the models cannot be compared: one has {model.vocab} tokens in its vocabulary, "
            f"the reference {reference.vocab}"
        )
    sums, tokens = torch.zeros(4, dtype=torch.float64), 0
    for window in _counted(windows, on_progress):
        theirs = reference.states(window)
        for rows, targets, other in _chunks(model.vocab, window, model.states(window), theirs):
            sums += _differences(_log_probs(model, rows), _log_probs(reference, other), targets).cpu()
            tokens += len(targets)
    nll, ref_nll, kl, same = sums.tolist()
    ppl, ref_ppl = (Perplexity.of(total, tokens).value for total in (nll, ref_nll))
    return Comparison(ppl, ref_ppl, kl / tokens, same / tokens, tokens)


def _differences(ours: Tensor, theirs: Tensor, targets: Tensor) -> Tensor:  # 2 x [R, V], [R] -> [4] float64
    """Sums over rows: both negative log-likelihoods, KL(theirs || ours), equal likeliest tokens."""
    kl = (theirs.exp() * (theirs - ours)).sum(-1).double().sum()
    same = (ours.argmax(-1) == theirs.argmax(-1)).double().sum()
    return torch.stack((_nll(ours, targets), _nll(theirs, targets), kl, same))


def _nll(log_probs: Tensor, targets: Tensor) -> Tensor:  # [R, V], [R] -> [] float64
    return -log_probs.gather(-1, targets[:, None]).double().sum()


def _log_probs(model: Predictor, rows: Tensor) -> Tensor:  # [R, H] -> [R, V] float32
    found = model.logits(rows).log_softmax(-1)
    if not bool(found.isfinite().all()):
        raise MinicpmError(
            "the model's scores are not finite, most likely an overflow of float16. Run again with --dtype bf16 or "
            "fp32; if it stays, the weights are damaged."
        )
    return found


def _chunks(vocab: int, window: Window, *states: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """(rows of the first states, targets, rows of the others), few enough at a time for LOGIT_BYTES."""
    count = max(LOGIT_BYTES // (4 * vocab), 1)
    targets = torch.tensor(window.predicted, device=states[0].device)
    for start in range(0, len(targets), count):
        part = slice(start, start + count)
        yield states[0][part], targets[part], *(other[part] for other in states[1:])


def _counted(windows: Sequence[Window], on_progress: Progress | None) -> Iterator[Window]:
    for number, window in enumerate(windows):
        if on_progress:
            on_progress(number, len(windows))
        yield window
    if on_progress:
        on_progress(len(windows), len(windows))


class Reader:
    """A decoder as a predictor. Its scratch cache holds one window, which the next overwrites."""

    def __init__(self, decoder: Decoder, kv_format: KVFormat | None = None) -> None:
        self.decoder, self.kv_format = decoder, kv_format
        self._cache: KVCache | None = None

    @property
    def vocab(self) -> int:
        return self.decoder.cfg.vocab

    @torch.inference_mode()
    def states(self, window: Window) -> Tensor:  # [P, H]
        return self.hidden(window.ids)[window.first - 1 : -1]

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        return self.decoder.logits(states)

    @torch.inference_mode()
    def hidden(self, ids: Sequence[int]) -> Tensor:  # [T, H]
        """The residual stream after the last block, at every position."""
        cache = self._room_for(len(ids))
        parts = range(0, len(ids), STEP)
        batches = (_step(ids[start : start + STEP], start, self.decoder.device) for start in parts)
        return torch.cat([self.decoder.hidden(batch, cache) for batch in batches])

    def _room_for(self, tokens: int) -> KVCache:
        pages = -(-tokens // PAGE)
        if self._cache is None or self._cache.pages < pages:
            decoder = self.decoder
            self._cache = KVCache.allocate(decoder.cfg, pages, PAGE, decoder.device, decoder.dtype, self.kv_format)
        return self._cache


def logits_of(decoder: Decoder, ids: Sequence[int]) -> Tensor:  # [T, V] float32
    """Of every position at once: for a few thousand tokens at most."""
    reader = Reader(decoder)
    return reader.logits(reader.hidden(ids))


def _step(ids: Sequence[int], before: int, device: torch.device) -> ForwardBatch:
    """The next tokens of the only sequence, whose pages are the cache's own in their order."""
    end = before + len(ids)
    places = torch.arange(before, end, device=device)
    return ForwardBatch(
        ids=torch.tensor(ids, device=device),
        positions=places,
        slots=places,
        q_start=torch.tensor([0, len(ids)], dtype=torch.int32, device=device),
        kv_len=torch.tensor([end], dtype=torch.int32, device=device),
        page_table=torch.arange(-(-end // PAGE), dtype=torch.int32, device=device)[None],
        last=torch.tensor([len(ids) - 1], device=device),
        max_q=len(ids),
        max_kv=end,
        page_size=PAGE,
        q_lens=(len(ids),),
        kv_lens=(end,),
        runs=(0,),
    )


@dataclass(frozen=True, slots=True)
class Remembered:
    """A decoder's states of some windows with its head: all that a comparison needs after its blocks are gone."""

    head: Decoder
    kept: Mapping[Window, Tensor]  # [P, H] each, on the CPU

    @classmethod
    def of(cls, decoder: Decoder, windows: Sequence[Window], on_progress: Progress | None = None) -> Remembered:
        """Reads all windows now. The caller may drop the decoder then; its embedding and head stay."""
        reader = Reader(decoder)
        kept = {window: reader.states(window).cpu() for window in _counted(windows, on_progress)}
        head = copy.copy(decoder)
        head.blocks = ()
        return cls(head, kept)

    @property
    def vocab(self) -> int:
        return self.head.cfg.vocab

    def states(self, window: Window) -> Tensor:
        return self.kept[window].to(self.head.device)

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        return self.head.logits(states)
