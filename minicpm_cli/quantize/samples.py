"""Calibration text that the model writes itself: what it will see in use is what it says in use, and no data set is
needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from minicpm_cli.engine.engine import Engine, EngineConfig, EngineRequest
from minicpm_cli.llm.prompter import Prompter
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.decoder import Decoder
from minicpm_cli.model.kv import KVCache
from minicpm_cli.model.load_scheme import LoadScheme
from minicpm_cli.model.loader import load_model
from minicpm_cli.quantize.calibration import Amount, packed
from minicpm_cli.quantize.openings import BEGINNINGS, QUESTIONS
from minicpm_cli.text.template import ChatTemplate, build_prompt, raw_prompt
from minicpm_cli.text.tokenizer import Tokenizer
from minicpm_cli.types import Message, SamplingParams

PAGE = 16
DTYPE = torch.bfloat16
PLAIN_BYTES = 2_000_000_000  # of plain weights; larger models write in 4 bits
CACHE_BYTES = 512 << 20  # of keys and values: the promise of one block's memory must hold while sampling, too
SEATS, SHORTEST = 64, 128  # sequences at once, and the length below which there are fewer of them
Told = Callable[[int, int], None]  # (tokens, of how many)


@dataclass(frozen=True, slots=True)
class Seating:
    """How many sequences of how many tokens are written at once."""

    seats: int
    length: int

    @classmethod
    def of(cls, cfg: ModelConfig, itemsize: int, wanted: Amount) -> Seating:
        room = CACHE_BYTES // cfg.kv_bytes_per_token(itemsize)
        length = min(wanted.seqlen, cfg.context, max(SHORTEST, room // SEATS))
        return cls(max(1, min(SEATS, room // length, -(-wanted.tokens // length))), length)

    @property
    def pages(self) -> int:
        return 1 + self.seats * (-(-self.length // PAGE) + 1)


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
    tokens = 0
    with closing(Engine(decoder, kv, config).generate(_requests(prompts, eos_ids, seating, seed, samples))) as events:
        for event in events:
            if event.error is not None:
                raise event.error
            if event.token is not None:
                samples[event.id].append(event.token)
                tokens += 1
                on_progress(tokens, wanted.tokens)
            if tokens >= wanted.tokens:
                break
    return packed([samples[name] for name in sorted(samples, key=int)], wanted)


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
    """Loads the model, 4-bit where its plain weights are large, and lets it write. Its memory is free afterwards."""
    checkpoint = prompter.checkpoint
    large = checkpoint.cfg.parameters * DTYPE.itemsize > PLAIN_BYTES and checkpoint.scheme is None
    seating = Seating.of(checkpoint.cfg, DTYPE.itemsize, wanted)
    cfg = checkpoint.cfg.with_context(seating.length)
    scheme = LoadScheme.of("w4" if large else None, 16)
    decoder = load_model(checkpoint.path, cfg, device, DTYPE, scheme=scheme)
    prompts = openings(prompter.tokenizer, prompter.template)
    ids = own_samples(decoder, prompts, prompter.eos_ids, wanted, seed, on_progress)
    del decoder
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return ids
