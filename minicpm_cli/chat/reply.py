"""One answer while it comes: text, thinking and, at the end, how it went."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from minicpm_cli.chat.loops import Loop, LoopWatch, OnLoop
from minicpm_cli.text.tools import gathered
from minicpm_cli.types import Channel, Event, FinishReason, Logprob, Message, Timings, ToolCall, ToolCallDelta, Usage


@dataclass(slots=True)
class Reply:
    """`prefill` is the beginning that the user gave; it belongs to the text.

    With `on_loop` "stop" it ends where it `looped`, before its request does.
    """

    prefill: str = ""
    on_loop: OnLoop = "ignore"
    looped: Loop | None = None
    finish: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    seed: int | None = None
    incomplete: bool = False
    thought_out: bool = False  # whether the budget ended its thinking
    logprobs: list[Logprob] = field(default_factory=list)
    _text: list[str] = field(default_factory=list)
    _thought: list[str] = field(default_factory=list)
    _pieces: list[ToolCallDelta] = field(default_factory=list)
    _watch: dict[Channel, LoopWatch] = field(default_factory=lambda: {"think": LoopWatch(), "answer": LoopWatch()})

    def follow(self, events: Iterable[Event]) -> Iterator[Event]:
        """The events, recorded as they pass. Raises the error that the request ended in."""
        for event in events:
            if event.error is not None:
                raise event.error
            if event.tool_call is not None:
                self._pieces.append(event.tool_call)
            if event.text:
                (self._text if event.channel == "answer" else self._thought).append(event.text)
            self.logprobs += event.logprobs
            if event.finish is not None:
                self.finish, self.usage, self.timings = event.finish, event.usage, event.timings
                self.incomplete, self.thought_out = event.incomplete, event.thought_out
            self.seed = event.seed if event.seed is not None else self.seed
            yield event
            if self.on_loop == "stop" and event.finish is None:
                self.looped = self._watch[event.channel].hear(event.text)
            if self.looped:
                return

    @property
    def text(self) -> str:
        return self.prefill + "".join(self._text)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return gathered(self._pieces)

    @property
    def thought(self) -> str | None:
        return "".join(self._thought) if self._thought else None

    @property
    def empty(self) -> bool:
        return not self._text and not self._thought

    @property
    def unanswered(self) -> bool:
        """Whether the model ended it and said nothing, whatever it thought."""
        return self.finish == "stop" and not self.text.strip() and not self._pieces

    @property
    def message(self) -> Message:
        return Message("assistant", self.text, self.thought)

    @property
    def cut(self) -> bool:
        """Whether the limit of tokens ended it."""
        return self.finish == "length"

    def summary(self) -> str:
        """One line of numbers."""
        if self.usage is None or self.timings is None:
            return "no numbers: the reply was stopped"
        u, t = self.usage, self.timings
        return (
            f"{u.prompt_tokens} tokens in ({u.cached_tokens} cached), {u.completion_tokens} out, "
            f"first after {t.first_token_seconds:.2f} s, {t.prefill_rate(u):.0f} tok/s in, "
            f"{t.decode_rate(u):.1f} tok/s out, seed {self.seed}"
        )
