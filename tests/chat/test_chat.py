"""A conversation with a fake model: questions, commands, overflow, interruption."""

from __future__ import annotations

import errno
import io
import os
import signal

import pytest
from talks import Lines, Make, contents, stored, told

from fakes import FakeLLM, rendered, words
from minicpm_cli.chat import repl
from minicpm_cli.chat.conversation import Conversation
from minicpm_cli.chat.lines import PipedLines
from minicpm_cli.chat.overflow import Choice, Excess
from minicpm_cli.chat.sessions import Sessions
from minicpm_cli.chat.terminal import neutral
from minicpm_cli.errors import ContextOverflow, RequestError, UsageError
from minicpm_cli.types import Event, Message, Request


def test_the_whole_list_is_sent_each_time(make: Make) -> None:
    llm = FakeLLM()
    chat = make(llm)
    chat.say("one")
    chat.say("two")
    said = ["one", "You said: one", "two", "You said: two"]
    assert contents(chat) == said
    assert [m.content for m in llm.seen[1].messages] == said[:3]  # type: ignore[union-attr]
    assert Sessions(chat.sessions.folder).open("test").messages == chat.conversation.messages


def test_thinking_is_kept_apart(make: Make) -> None:
    chat = make(FakeLLM(thought=lambda request: "Hm."))
    chat.say("one")
    assert chat.conversation.messages[1] == Message("assistant", "You said: one", "Hm.")
    assert told(chat) == "Hm.\n"


def test_thoughts_that_no_answer_follows_are_kept_and_said(make: Make) -> None:
    """The model ends its reply within a think block that it does not close."""
    chat = make(FakeLLM(thought=lambda request: "Hm.", answer=lambda request: ""))
    chat.say("one")
    assert chat.conversation.messages[1] == Message("assistant", "", "Hm.")
    assert not chat.conversation.turns[-1].partial
    assert "ended its reply without an answer" in told(chat)


def test_ctrl_c_keeps_what_came_and_marks_it(make: Make) -> None:
    def answer(request: Request) -> str:
        return "a b c d e f"

    llm = FakeLLM(answer=answer)
    chat = make(llm)
    original = llm._events

    def interrupted(request: Request):  # type: ignore[no-untyped-def]
        for count, event in enumerate(original(request)):
            if count == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield event

    llm._events = interrupted  # type: ignore[method-assign]
    chat.say("one")
    assert chat.stopped
    turn = chat.conversation.turns[-1]
    assert (turn.message.content, turn.partial) == ("a b c", True)
    assert turn.made is not None
    assert turn.made.seed is not None
    assert llm.aborted == ["chat"]
    assert "partial" in told(chat)
    llm._events = original  # type: ignore[method-assign]
    chat.retry()
    assert contents(chat) == ["one", "a b c d e f"]
    assert not chat.conversation.turns[-1].partial


def test_ctrl_c_before_the_first_word_takes_the_question_back(make: Make) -> None:
    llm = FakeLLM()

    def interrupted(request: Request):  # type: ignore[no-untyped-def]
        os.kill(os.getpid(), signal.SIGINT)
        yield from ()

    llm._events = interrupted  # type: ignore[method-assign]
    chat = make(llm)
    chat.say("one")
    assert contents(chat) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_reply_is_kept_when_the_process_is_to_end(make: Make, number: int) -> None:
    def ended(request: Request):  # type: ignore[no-untyped-def]
        yield Event(request.id, "a b")
        os.kill(os.getpid(), number)
        yield Event(request.id, " c")

    llm = FakeLLM()
    llm._events = ended  # type: ignore[method-assign]
    chat = make(llm)
    with pytest.raises(SystemExit) as raised:
        chat.say("one")
    assert raised.value.code == 128 + number
    assert [(turn.message.content, turn.partial) for turn in stored(chat)] == [("one", False), ("a b", True)]
    assert signal.getsignal(number) == signal.SIG_DFL


def test_no_signal_interrupts_the_keeping(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = make(FakeLLM())
    add = Conversation.add

    def pressed(self: Conversation, message: Message, *, partial: bool = False) -> None:
        if message.role == "assistant":
            for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
                os.kill(os.getpid(), number)
        add(self, message, partial=partial)

    monkeypatch.setattr(Conversation, "add", pressed)
    chat.say("one")
    assert [turn.message.content for turn in stored(chat)] == ["one", "You said: one"]


def test_a_retry_that_brings_nothing_changes_nothing(make: Make) -> None:
    llm = FakeLLM(context=9)
    chat = make(llm)
    chat.say("one")
    said = ["one", "You said: one"]
    chat.given["max_tokens"] = 9
    with pytest.raises(ContextOverflow):
        chat.retry()
    assert contents(chat) == said
    del chat.given["max_tokens"]

    def interrupted(request: Request):  # type: ignore[no-untyped-def]
        os.kill(os.getpid(), signal.SIGINT)
        yield from ()

    llm._events = interrupted  # type: ignore[method-assign]
    chat.retry()
    assert contents(chat) == said
    assert [turn.message.content for turn in stored(chat)] == said
    assert "nothing is changed" in told(chat)


def test_files_wait_on_when_their_question_is_taken_back(make: Make) -> None:
    llm = FakeLLM(fail=lambda request: RequestError("internal", "no"))
    chat = make(llm)
    chat.attached.append(("a.txt", "inside"))
    with pytest.raises(RequestError):
        chat.say("what?")
    assert chat.attached == [("a.txt", "inside")]
    llm.fail = lambda request: None
    chat.say("what?")
    assert "inside" in contents(chat)[0]
    assert chat.attached == []


def test_an_error_leaves_the_list_as_it_was(make: Make) -> None:
    chat = make(FakeLLM(fail=lambda request: RequestError("internal", "no")))
    with pytest.raises(RequestError):
        chat.say("one")
    assert contents(chat) == []
    assert told(chat) == ""


def test_overflow_stops_before_anything_is_sent(make: Make) -> None:
    llm = FakeLLM(context=8)
    chat = make(llm)
    chat.say("one")
    with pytest.raises(ContextOverflow, match=r"prompt 10 \+ max_new 1 > ctx 8"):
        chat.say("two three four")
    assert contents(chat) == ["one", "You said: one"]
    assert len(llm.seen) == 1


def test_dropping_the_oldest_keeps_the_list_and_the_system_prompt_and_says_what_goes(make: Make) -> None:
    llm = FakeLLM(context=16)
    chat = make(llm, overflow="drop-oldest")
    chat.conversation.set_system("brief")
    for question in ("one", "two", "three"):
        chat.say(question)
    assert len(contents(chat)) == 7
    assert rendered(llm.seen[-1]) == "system brief user two assistant You said: two user three"
    assert len(words(rendered(llm.seen[-1]))) <= 12
    assert "the model does not see the oldest question, from 'one' on any more" in told(chat)
    assert stored(chat)[-1].made is not None
    assert chat.conversation.left_out == 2


def test_what_was_dropped_stays_dropped_until_it_is_undone(make: Make) -> None:
    """Else every question would move the beginning, and the cache would serve none."""
    llm = FakeLLM(context=32, answer=lambda request: "ok")
    chat = make(llm, overflow="drop-oldest")
    for number in range(12):
        chat.say(f"question number {number}")
    beginnings = [request.messages[0].content for request in llm.seen]  # type: ignore[union-attr]
    assert len(set(beginnings)) < 6
    assert told(chat).count("does not see") == len(set(beginnings)) - 1
    chat.conversation.undo(11)
    chat.say("again")
    assert rendered(llm.seen[-1]) == "user question number 0 assistant ok user again"


@pytest.mark.parametrize(("choice", "sent"), [("drop", True), ("always", True), ("stop", False)])
def test_the_user_chooses_what_goes(make: Make, choice: Choice, sent: bool) -> None:
    offers: list[Excess] = []

    def choose(excess: Excess) -> Choice:
        offers.append(excess)
        return choice

    llm = FakeLLM(context=14)
    chat = make(llm, choose=choose)
    for question in ("one", "two"):
        chat.say(question)
    if sent:
        chat.say("three four")
        assert rendered(llm.seen[-1]) == "user two assistant You said: two user three four"
    else:
        with pytest.raises(ContextOverflow, match=r"prompt 15 \+ max_new 1 > ctx 14"):
            chat.say("three four")
        assert len(llm.seen) == 2
        assert len(contents(chat)) == 4
    assert chat.overflow == ("drop-oldest" if choice == "always" else "stop")
    (offer,) = offers
    assert offer.said() == "2 tokens too many: 15 with what was said before, in a context of 14"
    assert offer.offer() == "the oldest question, from 'one' on (6 tokens)"


def test_a_question_that_nothing_makes_fit_is_not_offered(make: Make) -> None:
    def choose(excess: Excess) -> Choice:
        raise AssertionError

    chat = make(FakeLLM(context=8), choose=choose)
    chat.say("one")
    with pytest.raises(ContextOverflow, match="prompt 9"):
        chat.say("one two three four five six seven eight")
    chat.choose = lambda excess: "drop"
    chat.say("one two three four five six")  # it fits alone, with less room than an answer should have
    assert len(chat.llm.seen) == 2  # type: ignore[attr-defined]


def test_little_room_for_an_answer_is_said(make: Make) -> None:
    chat = make(FakeLLM(context=100))
    chat.say(" ".join("x" * 90))
    assert "only 9 tokens of the context are left for the answer" in told(chat)


def test_a_retry_may_have_other_settings_that_are_not_kept(make: Make) -> None:
    llm = FakeLLM()
    chat = make(llm, given={"top_p": 0.5})
    chat.say("one")
    chat.retry({"temperature": 0.25, "max_tokens": 2})
    assert [(r.params.temperature, r.params.top_p) for r in llm.seen] == [(1.0, 0.5), (0.25, 0.5)]
    assert contents(chat) == ["one", "You said:"]
    made = stored(chat)[-1].made
    assert made is not None
    assert made.settings == {"temperature": 0.25, "top_p": 0.5, "max_tokens": 2}
    assert chat.params.temperature == 1.0


def test_the_model_goes_on_with_its_reply(make: Make) -> None:
    llm = FakeLLM(answer=lambda request: "five six" if request.prefill else "one two\n\nthree four")
    chat = make(llm, given={"max_tokens": 4})
    chat.say("count")
    out = chat.terminal.out
    assert isinstance(out, io.StringIO)
    out.truncate(out.seek(0))
    llm.answer = lambda request: " five six"
    chat.go_on()
    assert rendered(llm.seen[-1]) == "user count one two\n\nthree four"
    assert out.getvalue() == "three four five six\n"
    assert contents(chat) == ["count", "one two\n\nthree four five six"]
    made = stored(chat)[-1].made
    assert made is not None
    assert made.given == len("one two\n\nthree four")
    llm.answer = lambda request: ""
    chat.go_on()
    assert contents(chat)[-1].endswith("five six")
    assert "the model adds nothing" in told(chat)


def test_there_must_be_something_to_go_on_with(make: Make) -> None:
    chat = make(FakeLLM(thought=lambda request: "Hm."), given={"max_tokens": 1})
    with pytest.raises(UsageError, match="no reply to go on with"):
        chat.go_on()
    chat.say("one")
    with pytest.raises(UsageError, match="but its thoughts"):
        chat.go_on()
    chat.given.clear()
    chat.retry()
    chat.go_on()
    assert chat.llm.seen[-1].params.think is False  # type: ignore[attr-defined]
    assert chat.conversation.messages[-1].reasoning == "Hm."


def test_a_session_that_cannot_be_written_is_said_and_written_later(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    chat = make()
    chat.say("one")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        chat.say("two")
    assert "No space left on device" in told(chat)
    assert [turn.message.content for turn in stored(chat)] == ["one", "You said: one"]
    assert [path.name for path in chat.sessions.folder.iterdir()] == ["test.jsonl"]
    chat.say("three")
    assert [turn.message.content for turn in stored(chat)] == contents(chat)
    assert len(contents(chat)) == 6


def test_a_cut_reply_is_announced(make: Make) -> None:
    chat = make(given={"max_tokens": 2})
    chat.say("one")
    assert "cut at max_tokens (2): /continue" in told(chat)
    assert not chat.conversation.turns[-1].partial


def test_lines_with_slashes(make: Make) -> None:
    chat = make()
    assert repl.run(chat, Lines("//etc is a folder", "/undo", "  /set seed 5", "")) == 0
    assert contents(chat) == []
    assert chat.params.seed == 5


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ((KeyboardInterrupt, KeyboardInterrupt), 130),
        ((KeyboardInterrupt, "hi", KeyboardInterrupt, EOFError), 0),
        ((EOFError,), 0),
        (("/exit", "hi"), 0),
        (("/nope", "/undo x", "hi"), 0),
    ],
)
def test_how_a_conversation_ends(make: Make, lines: tuple[str | type[BaseException], ...], code: int) -> None:
    assert repl.run(make(), Lines(*lines)) == code


def test_overflow_at_the_prompt_says_what_to_do(make: Make) -> None:
    chat = make(FakeLLM(context=4))
    assert repl.run(chat, Lines("one two three four five")) == 0
    assert "/undo" in told(chat)


def test_a_pipe_is_a_turn_a_line_and_ends_at_the_first_error(make: Make) -> None:
    chat = make()
    pipe = io.BytesIO(b"one \\\nmore\r\n\n/set seed 1\ntwo\\")
    assert repl.run(chat, PipedLines(pipe)) == 0
    assert contents(chat)[::2] == ["one \nmore", "two"]
    with pytest.raises(UsageError, match="line 2 of stdin is not UTF-8: byte 0xff at offset 1"):
        repl.run(make(), PipedLines(io.BytesIO(b"a\nb\xff\n")))
    with pytest.raises(UsageError):
        repl.run(make(), PipedLines(io.BytesIO(b"/nope\n")))


def test_a_pipe_whose_line_never_ends(make, monkeypatch) -> None:
    monkeypatch.setattr("minicpm_cli.chat.lines.MOST", 100)
    with pytest.raises(UsageError, match="line 2 of stdin has more than"):
        repl.run(make(), PipedLines(io.BytesIO(b"a\n" + bytes(101))))


def test_neutral_text_moves_no_cursor() -> None:
    assert neutral("a\tb\n") == "a\tb\n"
    assert neutral("\x1b[2J\r\x08\x7f\x9b\u202e") == "␛[2J␍␈␡<U+009B><U+202E>"
    assert neutral("你好 👨‍👩‍👧") == "你好 👨‍👩‍👧"


def test_a_budget_that_ended_the_thinking_is_said(make: Make) -> None:
    chat = make(FakeLLM(thought=lambda request: "one two three four"))
    chat.say("Hi", {"think_budget": 2})
    assert "thinking was ended at think_budget (2); /retry think_budget=N" in told(chat)
