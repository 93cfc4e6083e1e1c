"""The mask of one answer: nothing is forbidden to what a model thinks, and only what the grammar allows may follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from minicpm_cli.errors import RequestError
from minicpm_cli.grammar.source import reason
from minicpm_cli.text.bitmask import put
from minicpm_cli.types import FinishReason

Row = NDArray[np.int32]


class Thinking(Protocol):
    """Who knows whether the next token belongs to what the model thinks, such as a TextSink."""

    @property
    def thinking(self) -> bool: ...


class Budget(Protocol):
    """A limit to thinking, such as text.thinking.ThinkBudget; `forced` while it writes the end of it."""

    @property
    def forced(self) -> bool: ...

    def fill(self, row: Any) -> None: ...
    def accept(self, token: int) -> FinishReason | None: ...


class GrammarMask:
    """A TokenMask over an LLMatcher, which `begin` makes when it is needed first.

    `ends` are the tokens that end an answer: not while the model thinks. `opens` may come first instead of the answer:
    they begin thinking. `spaces` may stand once between it and the answer.
    `rest` are the tokens of what a token that is the end of a closing tag says of the answer.
    """

    def __init__(
        self,
        begin: Callable[[], Any],
        sink: Thinking,
        budget: Budget | None = None,
        *,
        ends: Iterable[int] = (),
        opens: Iterable[int] = (),
        spaces: Iterable[int] = (),
        rest: Callable[[int], list[int]] = lambda token: [],
    ) -> None:
        self._begin, self._sink, self._budget, self._rest = begin, sink, budget, rest
        self._ends, self._spaces = frozenset(ends), frozenset(spaces)
        self._free = self._is_free()
        self._also = frozenset() if self._free else frozenset(opens)  # beside what the grammar allows

    @cached_property
    def _matcher(self) -> Any:
        """Raises RequestError(schema_invalid)."""
        return self._begin()

    def fill(self, row: Row) -> None:
        if self._free:
            for token in self._ends:
                put(row, token, allowed=False)
            if self._budget is not None:
                self._budget.fill(row)
            return
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        self._check()
        row[: len(allowed)] = allowed[: len(row)]
        row[len(allowed) :] = 0
        for token in self._also:
            put(row, token, allowed=True)

    def accept(self, token: int) -> FinishReason | None:
        was_free, also = self._free, self._also
        if self._budget is not None:
            self._budget.accept(token)
        self._free, self._also = self._is_free(), frozenset()
        if self._free:
            return None
        if was_free:
            self._also = self._spaces
            return self._take(self._rest(token))
        return None if also is self._spaces and token in also else self._take([token])

    def _take(self, tokens: list[int]) -> FinishReason | None:
        if tokens:
            self._matcher.consume_tokens(tokens)
            self._check()
        return "stop" if tokens and self._matcher.is_stopped() else None

    def _is_free(self) -> bool:
        return self._sink.thinking or (self._budget is not None and self._budget.forced)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(
                "schema_invalid", f"the answer cannot go on as asked: {reason(self._matcher.get_error())}"
            )
