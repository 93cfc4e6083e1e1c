"""Calibration text that the model writes itself: what it will see in use is what it says in use, and no data set is
needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import torch
from torch import Tensor

from minicpm_cli.engine.engine import Engine, EngineConfig, EngineRequest
from minicpm_cli.llm.prompter import Prompter
from minicpm_cli.model.decoder import Decoder
from minicpm_cli.model.kv import KVCache
from minicpm_cli.model.load_scheme import AS_STORED, LoadScheme
from minicpm_cli.model.loader import build_decoder
from minicpm_cli.model.source import TensorSource, open_source
from minicpm_cli.quantize.calibration import Amount, packed
from minicpm_cli.quantize.openings import BEGINNINGS, QUESTIONS
from minicpm_cli.quantize.seating import PAGE, Seating, sampled_in
from minicpm_cli.text.template import ChatTemplate, build_prompt, raw_prompt
from minicpm_cli.text.tokenizer import Tokenizer
from minicpm_cli.types import Message, SamplingParams

DTYPE = torch.bfloat16
Told = Callable[[int, int], None]  # (tokens, of how many)


def openings(tokenizer: Tokenizer, template: ChatTemplate | None) -> list[list[int]]:
    """Prompts of every kind that the model takes: questions through its template, beginnings of texts, and nothing."""
    texts = list(BEGINNINGS)
    found = [] if tokenizer.bos_id is None else [[tokenizer.bos_id]]
    if template is None:
        texts += QUESTIONS
    else:
        found += [build_prompt(tokenizer, template, [Message("user", q)]).ids for q in QUESTIONS]
    return [ids for ids in (*found, *(raw_prompt(tokenizer, text).ids for text in texts)) if ids]


def own_samples(
    decoder: Decoder,
    prompts: list[list[int]],
    eos_ids: frozenset[int],
    wanted: Amount,
    seed: int,
    on_progress: Told,
) -> Tensor:  # [R, S] int64
    """Rows of prompts and what the model makes of them at temperature 1, one behind the other."""
    seating = Seating.of(decoder.cfg, decoder.dtype.itemsize, wanted)
    kv = KVCache.allocate(decoder.cfg, seating.pages, PAGE, decoder.device, decoder.dtype)
    config = EngineConfig(
        pages=seating.pages,
        max_seqs=seating.seats,
        max_batch_tokens=max(512, seating.seats),
        context=seating.length,
        page_size=PAGE,
        prefix_cache=False,
    )
    samples: dict[str, list[int]] = {}
    begun: set[str] = set()
    tokens = 0
    with closing(Engine(decoder, kv, config).generate(_requests(prompts, eos_ids, seating, seed, samples))) as events:
        for event in events:
            if event.error is not None:
                raise event.error
            if event.token is not None:
                tokens += 1 if event.id in begun else 1 + len(samples[event.id])
                begun.add(event.id)
                samples[event.id].append(event.token)
                on_progress(min(tokens, wanted.tokens), wanted.tokens)
            if tokens >= wanted.tokens:
                break
    return packed([samples[name] for name in sorted(begun, key=int)], wanted)


def _requests(
    prompts: list[list[int]],
    eos_ids: frozenset[int],
    seating: Seating,
    seed: int,
    samples: dict[str, list[int]],
) -> Iterator[EngineRequest]:
    """Without end; each gets a seed of its own. The prompt is the sample's beginning."""
    number = 0
    while True:
        prompt = prompts[number % len(prompts)][: seating.length // 2]
        params = SamplingParams(max_tokens=seating.length - len(prompt))
        samples[str(number)] = list(prompt)
        yield EngineRequest(str(number), tuple(prompt), params, seed + number, eos_ids)
        number += 1


def model_samples(prompter: Prompter, wanted: Amount, seed: int, device: torch.device, on_progress: Told) -> Tensor:
    """Loads the model, lets it write and drops it. Plain weights are the fastest for many sequences at once; a large
    model is loaded in 4 bits, unless its file is packed as it is."""
    checkpoint = prompter.checkpoint
    cfg = checkpoint.cfg.with_context(Seating.of(checkpoint.cfg, DTYPE.itemsize, wanted).length)
    source, scheme = open_source(checkpoint.path, cfg), LoadScheme.of(sampled_in(cfg), 16)
    if not scheme.linear:
        source = Unpacked(source)
    elif checkpoint.packing:
        scheme = AS_STORED
    decoder = build_decoder(source, cfg, device, DTYPE, scheme=scheme)
    prompts = openings(prompter.tokenizer, prompter.template)
    ids = own_samples(decoder, prompts, prompter.eos_ids, wanted, seed, on_progress)
    del decoder
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return ids


class Unpacked:
    """A source whose packed tensors come plain."""

    def __init__(self, inner: TensorSource) -> None:
        self._inner = inner

    def __contains__(self, name: str) -> bool:
        return name in self._inner

    def names(self) -> set[str]:
        return self._inner.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._inner.shape(name)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        stored = self._inner.take(name, shape)
        return stored if isinstance(stored, Tensor) else stored.dequantize(DTYPE)

    def ignore(self, name: str) -> None:
        self._inner.ignore(name)

    def finish(self) -> None:
        self._inner.finish()
