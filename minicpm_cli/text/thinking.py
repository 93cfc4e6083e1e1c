"""A limit to what a model thinks: when it is reached, the tokens that end thinking are the only ones that may come."""

from __future__ import annotations

from typing import Any

from minicpm_cli.text.bitmask import bit
from minicpm_cli.text.detok import THINK_TAGS, TextSink, ThinkTags
from minicpm_cli.text.tokenizer import Tokenizer
from minicpm_cli.types import FinishReason, SamplingParams


def think_budget(
    params: SamplingParams, tokenizer: Tokenizer, sink: TextSink, think_tags: ThinkTags = THINK_TAGS
) -> ThinkBudget | None:
    """What keeps `params.think_budget` for the answer that goes through `sink`; None where there is no limit."""
    if params.think_budget is None:
        return None
    return ThinkBudget(params.think_budget, _closing(tokenizer, think_tags), sink)


def _closing(tokenizer: Tokenizer, tags: ThinkTags) -> list[int]:
    """The tokens of a closing tag on a line of its own; where the vocabulary has one as a token, of that one."""
    known = [close for _, close in tags if close in tokenizer.control_text]
    close = known[0] if known else tags[0][1]
    tag = [tokenizer.control_text[close]] if known else tokenizer.encode(close, control=False)
    return [*tokenizer.encode("\n", control=False), *tag, *tokenizer.encode("\n\n", control=False)]


class ThinkBudget:
    """A TokenMask. The tags themselves do not count; thinking that begins again has what is left of the budget."""

    def __init__(self, budget: int, closing: list[int], sink: TextSink) -> None:
        self.spent = False  # whether thoughts were ended by it
        self._left, self._closing, self._sink = budget, closing, sink
        self._thinking = sink.thinking
        self._place = 0  # in the closing tokens; 0 where the model is free
        self._forced = self._thinking and not budget

    def fill(self, row: Any) -> None:
        if self._forced:
            token = self._closing[self._place]
            row[:] = 0
            row[token // 32] = bit(token % 32)

    @property
    def forced(self) -> bool:
        """Whether the next token is one of those that end thinking."""
        return self._forced

    def accept(self, token: int) -> FinishReason | None:
        thought, self._thinking = self._thinking, self._sink.thinking
        if self._forced:
            self._place += 1
            self._forced = self._place < len(self._closing)
            self._place *= self._forced
            return None
        self._left -= thought and self._thinking
        self._forced = self._thinking and self._left <= 0
        self.spent = self.spent or (self._forced and thought)
        return None
