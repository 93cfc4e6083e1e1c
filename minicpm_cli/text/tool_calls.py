"""An answer's text taken apart into content and tool calls, while it comes.

A call is given out when it is whole, for what turns out to be none must come back as content to the letter. So the
result does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

from minicpm_cli.text.detok import TextSink
from minicpm_cli.text.stops import StopMatcher
from minicpm_cli.text.tool_blocks import Block, Forced
from minicpm_cli.text.tool_formats import ToolFormat
from minicpm_cli.types import Channel, FinishReason, Tool, ToolCallDelta

Piece = str | ToolCallDelta
# What the parsers of JSON and Python raise for texts that are none, or that nest too deeply.
_AHEAD = 64  # characters that tell whether an opening tag begins a call
_FAILURES = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, OverflowError)


class ToolCallParser:
    """`feed` takes text and gives what is certain by now, `close` the rest. Spaces around calls are not content.

    `identify` names the call with a number. `calls` are counted, `malformed` is whether something began as a call and
    was none, `spoke` whether there was content.
    """

    def __init__(self, how: ToolFormat, tools: Iterable[Tool], identify: Callable[[int], str]) -> None:
        self._format, self._tools, self._identify = how, {tool.name: tool for tool in tools}, identify
        self.calls = 0
        self.malformed = self.spoke = False
        self._out: list[Piece] = []
        self._space = ""
        self._plain = False
        self._block: Block | None = None
        self._matcher = StopMatcher([how.tags.open])

    def feed(self, text: str) -> list[Piece]:
        while text:
            text = self._content(text) if self._block is None else self._call(self._block, text)
        return self._taken()

    def close(self, *, cut: bool) -> list[Piece]:
        """The answer is over; `cut`: in the middle, so that a call without its end is none."""
        if (block := self._block) is not None and (cut or not self._finished(block)):
            self._reread(block, cut)
        self._say(self._matcher.flush())
        if not self.calls:
            self._emit(self._space)
        return self._taken()

    def _content(self, text: str) -> str:
        shown, opened = self._matcher.feed(text)
        self._say(shown)
        if not opened:
            return ""
        self._block = Block(self._format.tags, plain=self._plain)
        return self._matcher.rest

    def _call(self, block: Block, text: str) -> str:
        rest = block.feed(text)
        if not self._format.begins(block.raw + (rest or "")[:_AHEAD]):
            self._block = None
            tag = self._format.tags.open
            self._say(tag)
            return block.raw[len(tag) :] + (rest or "")
        if rest is None:
            return ""
        self._block = None
        if block.reopened or not self._finished(block):
            self._fail(block)
        return rest

    def _finished(self, block: Block) -> bool:
        """Whether the block is calls; they are given out then."""
        try:
            calls = self._format.parse(block.raw, self._tools)
        except _FAILURES:
            return False
        self._block = None
        for name, arguments in calls:
            self._out.append(ToolCallDelta(self.calls, id=self._identify(self.calls), name=name))
            self._out.append(ToolCallDelta(self.calls, arguments))
            self.calls += 1
        return True

    def _fail(self, block: Block) -> None:
        self.malformed = True
        self._say(block.raw)
        self._emit(self._space)
        self._space = ""

    def _reread(self, block: Block, cut: bool) -> None:
        """A block that never ended: perhaps only a quotation in it did not, and its tags are there after all."""
        self._block, self._plain = None, True
        self._out = self.feed(block.raw)
        left, self._block = self._block, None
        if left is not None and (cut or not self._finished(left)):
            self._fail(left)

    def _say(self, text: str) -> None:
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if body:
            self._emit(body if self.spoke or not self.calls else body.lstrip())
            self.spoke = True

    def _emit(self, text: str) -> None:
        if text:
            self._out.append(text)

    def _taken(self) -> list[Piece]:
        out, self._out = self._out, []
        if len(out) < 2:
            return out
        joined: list[Piece] = []
        for is_text, run in groupby(out, lambda piece: isinstance(piece, str)):
            pieces = list(run)
            joined += ["".join(map(str, pieces))] if is_text else pieces
        return joined


class ToolCallStream:
    """The channels of an answer with the calls taken out of them.

    Calls belong into the answer. One that was only thought of stays a thought, unless there is nothing else: a model
    that forgets to stop thinking before it calls means the call. `forced` is what was begun for the model, and
    what ends it. With `one` the answer is its first call, and nothing that comes behind.
    """

    def __init__(
        self,
        how: ToolFormat,
        tools: Iterable[Tool],
        identify: Callable[[int], str],
        forced: Forced | None = None,
        *,
        one: bool = False,
    ) -> None:
        tools, forced = tuple(tools), forced or Forced()
        self._ended, self._one = forced.ended, one
        self._answer, self._thought = (ToolCallParser(how, tools, identify) for _ in range(2))
        self._called: list[ToolCallDelta] = []
        self._answer.feed(forced.begun)

    @property
    def over(self) -> bool:
        """The one call is there."""
        return self._one and self._answer.calls > 0

    def feed(self, pieces: Iterable[tuple[Channel, str]]) -> Iterator[tuple[Channel, Piece]]:
        for channel, text in pieces:
            if channel == "think":
                self._note(self._thought.feed(text))
                yield channel, text
            elif not self.over:
                yield from (("answer", piece) for piece in self._only(self._answer.feed(text)))

    def close(self, finish: FinishReason) -> list[tuple[Channel, Piece]]:
        """What was held back, and the calls of a thought that led to nothing else."""
        cut = finish != "stop"
        if self.over:
            return []
        pieces = self._only(self._answer.feed("" if cut else self._ended) + self._answer.close(cut=cut))
        self._note(self._thought.close(cut=cut))
        meant = self._called if not cut and not self._answer.calls and not self._answer.spoke else []
        self._called = meant
        return [("answer", piece) for piece in (*pieces, *meant)]

    def finish(self, finish: FinishReason) -> FinishReason:
        """Why the answer ended, after `close`: a call that was cut off ended for the reason that cut it."""
        if finish != "stop":
            return finish
        if self._answer.malformed and not self.over:
            return "malformed_tool_call"
        return "tool_calls" if self._answer.calls or self._called else "stop"

    def _only(self, pieces: list[Piece]) -> list[Piece]:
        """Without what comes behind the one call."""
        if not self.over:
            return pieces
        return [piece for piece in pieces if isinstance(piece, ToolCallDelta) and piece.index == 0]

    def _note(self, pieces: Iterable[Piece]) -> None:
        self._called.extend(piece for piece in pieces if isinstance(piece, ToolCallDelta))


class CallSink:
    """A TokenSink as a TextSink is one, whose text comes with the calls taken out of it."""

    def __init__(self, sink: TextSink, stream: ToolCallStream) -> None:
        self._sink, self._stream = sink, stream
        self._pieces: list[tuple[Channel, Piece]] = []

    def push(self, token: int) -> FinishReason | None:
        finish = self._sink.push(token)
        self._pieces += self._stream.feed(self._sink.take())
        return "stop" if self._stream.over else finish

    def take(self) -> list[tuple[Channel, Piece]]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def close(self, finish: FinishReason) -> list[tuple[Channel, Piece]]:
        self._pieces += self._stream.feed(self._sink.close())
        self._pieces += self._stream.close(finish)
        return self.take()

    def finish(self, finish: FinishReason) -> FinishReason:
        """Why the answer ended, after `close`."""
        return self._stream.finish(finish)
