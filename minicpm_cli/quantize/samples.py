"""Calibration text that the model writes itself: what it will see in use is what it says in use, and no data set is
needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from minicpm_cli.engine.engine import Engine, EngineConfig, EngineRequest
from minicpm_cli.llm.prompter import Prompter
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.decoder import Decoder
from minicpm_cli.model.kv import KVCache
from minicpm_cli.model.load_scheme import LoadScheme
from minicpm_cli.model.loader import build_decoder
from minicpm_cli.model.lora import Adapter
from minicpm_cli.model.shapes import Shape, tensor_shapes
from minicpm_cli.quantize.calibration import Amount, packed
from minicpm_cli.quantize.layers import block_shapes
from minicpm_cli.quantize.memory import trim
from minicpm_cli.quantize.openings import BEGINNINGS, QUESTIONS
from minicpm_cli.quantize.seating import PAGE, Seating, sampled_in
from minicpm_cli.quantize.tensors import read_tensors
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
    model is loaded in 4 bits."""
    checkpoint = prompter.checkpoint
    cfg = checkpoint.cfg.with_context(Seating.of(checkpoint.cfg, DTYPE.itemsize, wanted).length)
    scheme = LoadScheme.of(sampled_in(cfg), 16)
    decoder = build_decoder(Parts(checkpoint.path, cfg, checkpoint.adapter), cfg, device, DTYPE, scheme=scheme)
    prompts = openings(prompter.tokenizer, prompter.template)
    ids = own_samples(decoder, prompts, prompter.eos_ids, wanted, seed, on_progress)
    del decoder
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim()
    return ids


class Parts:
    """A checkpoint as a source that maps one block of it at a time, plain.

    What was read of a mapped file stays resident until it is unmapped, and all of a large one may not fit.
    """

    def __init__(self, path: Path, cfg: ModelConfig, adapter: Adapter | None = None) -> None:
        self._path, self._cfg, self._adapter = path, cfg, adapter
        self._shapes = {name: shape for part in _parts(cfg) for name, shape in part.items()}
        self._held: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._held:
            self._held = {}  # goes before the next one comes
            part = next(part for part in _parts(self._cfg) if name in part)
            self._held = read_tensors(self._path, self._cfg, part, self._adapter)
        return self._held.pop(name)

    def ignore(self, name: str) -> None:
        """Nothing is accounted for here."""

    def finish(self) -> None:
        self._held = {}


def _parts(cfg: ModelConfig) -> Iterator[dict[str, Shape]]:
    """Each tensor outside the blocks, and each block."""
    for name, shape in tensor_shapes(cfg).items():
        if not name.startswith("model.layers."):
            yield {name: shape}
    for index in range(cfg.layers):
        yield block_shapes(cfg, index)
