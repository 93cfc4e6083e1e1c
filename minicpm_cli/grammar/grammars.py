"""The grammars of a model: each is compiled once, and every answer that follows it gets a copy at its beginning."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from functools import cached_property, partial
from typing import Any

from minicpm_cli.errors import RequestError
from minicpm_cli.grammar.calls import call_grammar
from minicpm_cli.grammar.mask import Budget, GrammarMask, Thinking
from minicpm_cli.grammar.source import Source, grammar_of, reason
from minicpm_cli.grammar.vocabulary import wrapped
from minicpm_cli.text.detok import THINK_TAGS
from minicpm_cli.text.tokenizer import Tokenizer
from minicpm_cli.types import SamplingParams

KEPT = 64  # compiled grammars; the last ones used


class Grammars:
    """For one tokenizer. Any thread may ask: rows of a batch are understood ahead of the engine."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Iterable[int]) -> None:
        self._tokenizer, self._eos_ids = tokenizer, frozenset(eos_ids)
        self._compiled: OrderedDict[Source, Any] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, params: SamplingParams, prefill: str = "", rules: str | None = None) -> None:
        """Raises RequestError(schema_invalid | bad_parameter) if no answer that begins with `prefill` can follow.

        `rules` are those of a call, as `minicpm_cli.text.tool_rules` makes them.
        """
        if (source := _source(params, rules)) is not None:
            self._matcher(source, prefill)

    def mask(
        self,
        params: SamplingParams,
        sink: Thinking,
        budget: Budget | None = None,
        prefill: str = "",
        rules: str | None = None,
    ) -> GrammarMask | None:
        """The mask of a new answer, whose text goes through `sink`; None where nothing is asked of it.

        Its grammar is compiled when the mask is filled first, while a GPU reads prompts. Raises RequestError for a
        prefill that does not fit.
        """
        source = _source(params, rules)
        if source is None:
            return None
        if begun := "" if sink.thinking else prefill:
            self._matcher(source, begun)
        return GrammarMask(
            partial(self._matcher, source, begun),
            sink,
            budget,
            ends=self._eos_ids,
            opens=() if params.think is False or prefill else self._opens,
            spaces=self._spaces,
            rest=self._rest,
        )

    def complete(self, params: SamplingParams, text: str) -> bool:
        """Whether `text` is what its schema or regex asks for, from beginning to end."""
        source = Source.of(params)
        if source is None:
            return True
        try:
            return bool(self._matcher(source, text).is_accepting())
        except RequestError:
            return False

    @cached_property
    def _wrapped(self) -> Any:
        return wrapped(self._tokenizer, self._eos_ids)

    @cached_property
    def _opens(self) -> frozenset[int]:
        """Tokens with which a model begins to think by itself."""
        control = self._tokenizer.control_text
        return frozenset(control[tag] for tag, _ in THINK_TAGS if tag in control)

    @cached_property
    def _spaces(self) -> frozenset[int]:
        """New lines that are one token."""
        written = (self._tokenizer.encode(text, control=False) for text in ("\n", "\n\n"))
        return frozenset(ids[0] for ids in written if len(ids) == 1)

    def _rest(self, token: int) -> list[int]:
        if token in self._tokenizer.control_ids:
            return []
        rest = self._tokenizer.piece(token).rpartition(b">")[2].lstrip()
        return self._tokens(rest) if rest else []

    def _tokens(self, data: bytes) -> list[int]:
        """Tokens that write it; which ones does not matter to a grammar."""
        tokens: list[int] = self._wrapped.greedy_tokenize(data.decode("utf-8", "replace"))
        return tokens

    def _matcher(self, source: Source, begun: str) -> Any:
        """A matcher behind `begun`. Raises RequestError(schema_invalid)."""
        with self._lock:
            compiled = self._compiled.get(source)
            if compiled is None:
                compiled = self._compiled[source] = self._compile(source)
            self._compiled.move_to_end(source)
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
            matcher = compiled.deep_copy()
        if begun and not matcher.consume_tokens(self._tokens(begun.encode())):
            raise RequestError("schema_invalid", f"no answer that begins with {begun[:60]!r} follows the {source.kind}")
        return matcher

    def _compile(self, source: Source) -> Any:
        from llguidance import LLMatcher

        known = source.kind == "call"
        grammar = call_grammar(source.text, self._tokenizer.control_text) if known else grammar_of(source)
        matcher = LLMatcher(self._wrapped, grammar, log_level=0)
        if matcher.is_error():
            raise RequestError("schema_invalid", f"the {source.kind} cannot be used: {reason(matcher.get_error())}")
        return matcher


def _source(params: SamplingParams, rules: str | None) -> Source | None:
    return Source.of(params) if rules is None else Source("call", rules)
