"""Rows of tokens that a quantizer learns from: of a text file, of conversations, or of the model's own samples."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minicpm_cli.errors import FileError, RequestError, UsageError
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.quantize.layers import linear_layers
from minicpm_cli.quantize.recipe import Recipe
from minicpm_cli.text.template import ChatTemplate, build_prompt
from minicpm_cli.text.tokenizer import Tokenizer
from minicpm_cli.types import ROLES, Message

SELF = "self"
# (samples, seqlen) where the user gives none. On a CPU tokens cost minutes; a GPU has time for the usual 128 x 2048,
# but the model's own samples have to be drawn one token after the other.
CPU_ROWS, CUDA_ROWS, CUDA_SELF_ROWS = (32, 512), (128, 2048), (64, 512)
JSONL = (".jsonl", ".ndjson")
# Tokens an input that a layer must see. The errors of four layers of the demo on other tokens, as parts of those of
# rounding with searched scales: with one token an input 1.2, 0.7, 1.2 and 1.3; with two 0.9, 0.6, 0.9 and 1.0; with
# four 0.8, 0.5, 0.8 and 0.9.
TOKENS_AN_INPUT = 2
UNEVEN = 1.5  # a router sends some experts fewer tokens than their share


@dataclass(frozen=True, slots=True)
class Amount:
    """How many rows of how many tokens are wanted."""

    samples: int
    seqlen: int

    @property
    def tokens(self) -> int:
        return self.samples * self.seqlen


def amount(recipe: Recipe, cfg: ModelConfig, *, cuda: bool) -> Amount:
    """The recipe's, or what suits the device; rows never exceed the model's context."""
    usual = CPU_ROWS
    if cuda:
        usual = CUDA_SELF_ROWS if recipe.calib == SELF else CUDA_ROWS
    seqlen = min(recipe.seqlen or usual[1], cfg.context)
    if recipe.seqlen and recipe.seqlen > cfg.context:
        raise UsageError(f"--seqlen {recipe.seqlen} is more than the model's context of {cfg.context} tokens")
    enough = max(floor(cfg, recipe), _for_experts(cfg))
    return Amount(recipe.samples or max(usual[0], -(-enough // seqlen)), seqlen)


def floor(cfg: ModelConfig, recipe: Recipe) -> int:
    """Tokens below which rounding does better, for the widest of the layers that see all tokens."""
    wanted = [la for la in linear_layers(cfg) if ".experts." not in la.name and not recipe.skips(la.name)]
    return TOKENS_AN_INPUT * max((layer.columns for layer in wanted), default=1)


def _for_experts(cfg: ModelConfig) -> int:
    """Tokens of which every expert is likely to see enough."""
    if cfg.moe is None:
        return 0
    return int(UNEVEN * TOKENS_AN_INPUT * max(cfg.hidden_size, cfg.intermediate) * cfg.moe.experts / cfg.moe.active)


def check_amount(tokens: int, cfg: ModelConfig, recipe: Recipe) -> None:
    """Raises UsageError for too few tokens, unless --force."""
    least = floor(cfg, recipe)
    if tokens < least and not recipe.force:
        raise UsageError(
            f"{tokens} calibration tokens are too few: below {least}, {TOKENS_AN_INPUT} for each input of the widest "
            "layer, rounding does better. Give more text, raise --samples or --seqlen, or take --method rtn; --force "
            "goes on."
        )


def from_file(path: Path, wanted: Amount, tokenizer: Tokenizer, template: ChatTemplate | None) -> Tensor:  # [R, S]
    """Rows spread evenly over the file's tokens. Raises FileError, UsageError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"cannot read --calib {path}: {error}") from None
    if path.suffix.lower() in JSONL:
        ids = [token for one in _conversations(path, text) for token in _rendered(path, one, tokenizer, template)]
    else:
        ids = tokenizer.encode(text, control=False)
    if len(ids) < 2:
        raise UsageError(f"--calib {path} holds {len(ids)} tokens; give a text")
    return spread(ids, wanted)


def spread(ids: Sequence[int], wanted: Amount) -> Tensor:  # [R, S] int64
    """The wanted rows, the same distance apart, or as many as the text has; a short text makes one short row."""
    length = min(wanted.seqlen, len(ids))
    rows = min(wanted.samples, len(ids) // length)
    step = (len(ids) - length) / max(rows - 1, 1)
    starts = [round(row * step) for row in range(rows)]
    return torch.tensor([list(ids[start : start + length]) for start in starts])


def packed(samples: Iterable[Sequence[int]], wanted: Amount) -> Tensor:  # [R, S] int64
    """Samples one behind the other, cut into rows."""
    ids = [token for sample in samples for token in sample]
    return spread(ids[: wanted.tokens], wanted)


def _conversations(path: Path, text: str) -> Iterator[list[Message]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield _messages(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise UsageError(f"--calib {path}, line {number}: {error}") from None


def _messages(record: Any) -> list[Message]:
    found = record.get("messages") if isinstance(record, dict) else record
    if not isinstance(found, list) or not found:
        raise ValueError('expected {"messages": [{"role": ..., "content": ...}, ...]}')
    return [_message(one) for one in found]


def _message(one: Any) -> Message:
    role, content = (one.get("role"), one.get("content")) if isinstance(one, dict) else (None, None)
    if role not in ROLES:
        raise ValueError(f"role {role!r} is not one of {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise ValueError(f"the content of a {role} message is no text")
    return Message(role, content)


def _rendered(path: Path, messages: list[Message], tokenizer: Tokenizer, template: ChatTemplate | None) -> list[int]:
    if template is None:
        raise UsageError(f"--calib {path} holds conversations, and the model has no chat template; give plain text")
    try:
        return build_prompt(tokenizer, template, messages, add_generation_prompt=False).ids
    except RequestError as error:
        raise UsageError(f"--calib {path}: {error}") from None
