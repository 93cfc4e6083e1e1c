"""Token ids of one answer back to text while they come: whole characters, exact stop strings, thinking apart.

Stop strings are looked for in the answer alone, not in what the model thinks: a model that reasons about a list would
otherwise be cut off by the first stop such as a newline. The stop that is complete first wins, and the longest of
those that end together; so the text does not depend on how it was cut into tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby
from operator import itemgetter

from minicpm_cli.text.stops import StopMatcher
from minicpm_cli.text.tokenizer import Tokenizer
from minicpm_cli.types import Channel, FinishReason

ThinkTags = Sequence[tuple[str, str]]
THINK_TAGS: ThinkTags = (("<think>", "</think>"), ("<|thought_start|>", "<|thought_end|>"))


class TextSink:
    """A TokenSink: `push` takes tokens, `take` gives the text that is certain by now, `close` the rest.

    `channel_start` is where the prompt left off: "think" when it ends inside an opened think block. A think block that
    the model opens itself is seen at the very start of its answer, or anywhere when the tag is a control token. Other
    control tokens are hidden unless `show_control`, or where `shown` names their text, as tool calls need it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Iterable[str] = (),
        channel_start: Channel = "answer",
        think_tags: ThinkTags = THINK_TAGS,
        *,
        show_control: bool = False,
        shown: Collection[str] = (),
    ) -> None:
        self._piece, self._control = tokenizer.piece, tokenizer.control_ids
        ids = tokenizer.control_text
        self._shown = self._control if show_control else frozenset(ids[tag] for tag in shown if tag in ids)
        self._open_ids = {ids[tag] for tag, _ in think_tags if tag in ids}
        self._close_ids = {ids[tag] for _, tag in think_tags if tag in ids}
        self._opens = tuple(tag for tag, _ in think_tags)
        self._closes = tuple(tag for _, tag in think_tags)
        self._stop_texts = tuple(stops)
        self._stops = StopMatcher(self._stop_texts)
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._out: list[tuple[Channel, str]] = []
        self._held = ""  # start of the answer: spaces and the beginning of a tag; thinking: spaces that may be its end
        self._lead = ""  # spaces at the start of the answer that went through the stops, but are not shown yet
        self._stopped = self._closed = False
        self._route: Callable[[str], str] = self._start
        if channel_start == "think":
            self._enter_think()
        elif not self._opens:
            self._route = self._answer

    def push(self, token: int) -> FinishReason | None:
        if self._stopped:
            return "stop"
        if token in self._control:
            stopped = self._push_control(token)
        else:
            stopped = self._feed(self._bytes.decode(self._piece(token)))
        return "stop" if stopped else None

    @property
    def stopped(self) -> bool:
        """A stop string was found; `close` may find one in what could have been the beginning of a think tag."""
        return self._stopped

    @property
    def thinking(self) -> bool:
        """Whether the next token is one of what the model thinks."""
        return self._route in (self._think, self._think_start)

    def take(self) -> list[tuple[Channel, str]]:
        """The pieces of text since the last call, in order."""
        out, self._out = self._out, []
        if len(out) < 2:
            return out
        return [(channel, "".join(text for _, text in run)) for channel, run in groupby(out, itemgetter(0))]

    def close(self) -> list[tuple[Channel, str]]:
        """The generation is over: what was held back is text after all. Also returns what `take` would have."""
        if not self._closed:
            self._closed = True
            self._feed(self._bytes.decode(b"", True))
            self._settle()
        return self.take()

    def _push_control(self, token: int) -> bool:
        opens, closes = token in self._open_ids, token in self._close_ids
        if not (opens or closes or token in self._shown):
            return False
        if self._feed(self._bytes.decode(b"", True)):
            return True
        thinking = self.thinking
        if opens and not thinking:
            self._open_by_token()
        elif closes and thinking:
            self._emit("think", (self._held + self._closing.flush()).rstrip())
            self._leave_think()
        elif not opens and not closes:
            return self._feed(self._piece(token).decode())
        return False

    def _feed(self, text: str) -> bool:
        """Whether a stop string has ended the answer."""
        while text and not self._stopped:
            text = self._route(text)
        return self._stopped

    # Each state takes text and returns what the next state is to read.

    def _start(self, text: str) -> str:
        """Nothing but spaces so far: it may be a think tag that comes."""
        text = self._held + text
        body = text.lstrip()
        if spaces := text[: len(text) - len(body)]:
            self._held = ""
            self._search_lead(spaces)
            if self._stopped:
                return ""
        tag = next((tag for tag in self._opens if body.startswith(tag)), None)
        if tag:
            self._lead = self._held = ""
            self._stops = StopMatcher(self._stop_texts)
            self._enter_think()
            return body[len(tag) :]
        if any(tag.startswith(body) for tag in self._opens):
            self._held = body
            return ""
        self._held = ""
        self._begin_answer()
        return body

    def _search_lead(self, spaces: str) -> None:
        text, self._stopped = self._stops.feed(spaces)
        self._lead += text
        if self._stopped:
            self._begin_answer()

    def _begin_answer(self) -> None:
        self._emit("answer", self._lead)
        self._lead = ""
        self._route = self._answer

    def _enter_think(self) -> None:
        self._closing = StopMatcher(self._closes)
        self._held = ""
        self._route = self._think_start

    def _think_start(self, text: str) -> str:
        """Spaces after the opening tag are not shown."""
        text = text.lstrip()
        if text:
            self._route = self._think
        return text

    def _think(self, text: str) -> str:
        shown, closed = self._closing.feed(text)
        shown = self._held + shown
        body = shown.rstrip()
        self._held = shown[len(body) :]
        self._emit("think", body)
        if not closed:
            return ""
        rest = self._closing.rest
        self._leave_think()
        return rest

    def _leave_think(self) -> None:
        self._held = ""
        self._route = self._after_think

    def _after_think(self, text: str) -> str:
        """Spaces between the closing tag and the answer are not shown."""
        text = text.lstrip()
        if text:
            self._route = self._answer
        return text

    def _answer(self, text: str) -> str:
        shown, self._stopped = self._stops.feed(text)
        self._emit("answer", shown)
        return ""

    def _open_by_token(self) -> None:
        if self._route == self._answer:
            self._emit("answer", self._stops.flush())
        else:
            self._lead = ""
        self._stops = StopMatcher(self._stop_texts)
        self._enter_think()

    def _settle(self) -> None:
        """Let go of everything that was held back."""
        if self._stopped:
            return
        if self._route == self._start:
            held, self._held = self._held, ""
            self._begin_answer()
            self._feed(held)
        elif self._route == self._think:
            self._emit("think", self._held + self._closing.flush())
        if not self._stopped:
            self._emit("answer", self._stops.flush())

    def _emit(self, channel: Channel, text: str) -> None:
        if text:
            self._out.append((channel, text))
