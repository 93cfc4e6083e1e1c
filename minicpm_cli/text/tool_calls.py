"""An answer's text taken apart into content and tool calls, while it comes.

A call is given out while it comes, as far as it is certain. One that turns out to be none is given up: its text comes
back as content to the letter. What the pieces make together does not depend on how the text was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from minicpm_cli.text.detok import TextSink
from minicpm_cli.text.stops import StopMatcher
from minicpm_cli.text.tool_blocks import Block, Forced
from minicpm_cli.text.tool_formats import ToolFormat
from minicpm_cli.text.tool_preview import FAILURES, Begun, Preview
from minicpm_cli.types import Channel, FinishReason, Tool, ToolCallDelta

Piece = str | ToolCallDelta
_AHEAD = 64  # characters that tell whether an opening tag begins a call


@dataclass(slots=True)
class _Said:
    """What was given out of a call that is not whole."""

    name: str
    arguments: str = ""

    def goes_on(self, name: str, arguments: str) -> bool:
        return name == self.name and arguments.startswith(self.arguments)


class ToolCallParser:
    """`feed` takes text and gives what is certain by now, `close` the rest. Spaces around calls are not content.

    `identify` names the call with a number. `calls` are counted when they are whole, `malformed` is whether something
    began as a call and was none, `spoke` whether there was content.
    """

    def __init__(self, how: ToolFormat, tools: Iterable[Tool], identify: Callable[[int], str]) -> None:
        self._format, self._tools, self._identify = how, {tool.name: tool for tool in tools}, identify
        self.calls = 0
        self.malformed = self.spoke = False
        self._out: list[Piece] = []
        self._space = ""
        self._plain = False
        self._block: Block | None = None
        self._preview: Preview | None = None
        self._said: list[_Said] = []  # of the block's calls
        self._index = 0  # of the next call: those that were given up keep theirs
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
        if not self._plain:
            self._preview = Preview(self._format.preview, len(self._format.tags.open), self._tools)
        return self._matcher.rest

    def _call(self, block: Block, text: str) -> str:
        rest = block.feed(text)
        if not self._format.begins(block.raw + (rest or "")[:_AHEAD]):
            self._block = None
            tag = self._format.tags.open
            self._say(tag)
            return block.raw[len(tag) :] + (rest or "")
        self._foretell(block)
        if rest is None:
            return ""
        self._block = None
        if block.reopened or not self._finished(block):
            self._fail(block)
        return rest

    def _foretell(self, block: Block) -> None:
        """Gives out what is certain by now."""
        for said in self._preview.read(block.raw) if self._preview else ():
            if isinstance(said, Begun):
                self._begin(said.name)
            else:
                self._argue(len(self._said) - 1, said)

    def _begin(self, name: str) -> None:
        self._out.append(ToolCallDelta(self._index, id=self._identify(self._index), name=name))
        self._said.append(_Said(name))
        self._index += 1

    def _argue(self, place: int, arguments: str) -> None:
        """The block's call at this place goes on."""
        if arguments:
            self._said[place].arguments += arguments
            self._out.append(ToolCallDelta(self._index - len(self._said) + place, arguments))

    def _finished(self, block: Block) -> bool:
        """Whether the block is calls, and those that were begun go on so; the rest of them is given out then."""
        try:
            calls = self._format.parse(block.raw, self._tools)
        except FAILURES:
            return False
        pairs = zip(self._said, calls, strict=False)
        if len(calls) < len(self._said) or not all(said.goes_on(*call) for said, call in pairs):
            return False
        for place, (name, arguments) in enumerate(calls):
            if place == len(self._said):
                self._begin(name)
            self._argue(place, arguments[len(self._said[place].arguments) :])
        self.calls += len(calls)
        self._block, self._said = None, []
        return True

    def _fail(self, block: Block) -> None:
        self.malformed = True
        first = self._index - len(self._said)
        self._out += [ToolCallDelta(first + place, void=True) for place in range(len(self._said))]
        self._said = []
        self._say(block.raw)
        self._emit(self._space)
        self._space = ""

    def _reread(self, block: Block, cut: bool) -> None:
        """A block that never ended: perhaps only a quotation in it did not, and its tags are there after all."""
        self._block, self._preview, self._plain = None, None, True
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
        return out if len(out) < 2 else [_together(list(run)) for _, run in groupby(out, _run_of)]


def _run_of(piece: Piece) -> object:
    """What neighbours have in common that can be one piece; a beginning or an end stays by itself."""
    if isinstance(piece, str):
        return None
    return piece.index if piece.arguments else piece


def _together(run: list[Piece]) -> Piece:
    if isinstance(run[0], str):
        return "".join(map(str, run))
    return replace(run[0], arguments="".join(piece.arguments for piece in _deltas(run)))


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
        self._one_index, self._calls = 0, False  # of the call that counts, where it is one, and whether it began
        self._begun = self._answer.feed(forced.begun)

    @property
    def over(self) -> bool:
        """The one call is there."""
        return self._one and self._answer.calls > 0

    def feed(self, pieces: Iterable[tuple[Channel, str]]) -> Iterator[tuple[Channel, Piece]]:
        for channel, text in pieces:
            if channel == "think":
                self._called += _deltas(self._thought.feed(text))
                yield channel, text
            elif not self.over:
                yield from (("answer", piece) for piece in self._only(self._answer.feed(text)))

    def close(self, finish: FinishReason) -> list[tuple[Channel, Piece]]:
        """What was held back, and the calls of a thought that led to nothing else."""
        cut = finish != "stop"
        if self.over:
            return []
        pieces = self._only(self._answer.feed("" if cut else self._ended) + self._answer.close(cut=cut))
        self._called += _deltas(self._thought.close(cut=cut))
        meant = whole(self._called) if not cut and not self._answer.calls and not self._answer.spoke else []
        self._called = [piece for piece in meant if not self._one or piece.index == 0]
        return [("answer", piece) for piece in (*pieces, *self._called)]

    def finish(self, finish: FinishReason) -> FinishReason:
        """Why the answer ended, after `close`: a call that was cut off ended for the reason that cut it."""
        if finish != "stop":
            return finish
        if self._answer.malformed and not self.over:
            return "malformed_tool_call"
        return "tool_calls" if self._answer.calls or self._called else "stop"

    def _only(self, pieces: list[Piece]) -> list[Piece]:
        """With what the prompt began, and without what comes behind the one call."""
        pieces, self._begun = self._begun + pieces, []
        return [piece for piece in pieces if self._counts(piece)] if self._one else pieces

    def _counts(self, piece: Piece) -> bool:
        if isinstance(piece, str):
            return not self._calls
        counts = piece.index == self._one_index
        self._calls = self._calls or counts
        if piece.void and counts:
            self._one_index, self._calls = piece.index + 1, False
        return counts


def _deltas(pieces: Iterable[Piece]) -> list[ToolCallDelta]:
    return [piece for piece in pieces if isinstance(piece, ToolCallDelta)]


def whole(pieces: Sequence[ToolCallDelta]) -> list[ToolCallDelta]:
    """The pieces of those calls that were not given up, numbered anew."""
    void = {piece.index for piece in pieces if piece.void}
    kept = sorted({piece.index for piece in pieces} - void)
    places = {index: place for place, index in enumerate(kept)}
    return [replace(piece, index=places[piece.index]) for piece in pieces if piece.index in places]


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
