"""A conversation with a fake model: questions, commands, overflow, interruption."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from fakes import FakeLLM, rendered, words
from minicpm_cli.chat import commands, repl
from minicpm_cli.chat.chat import Chat
from minicpm_cli.chat.conversation import Conversation, Turn
from minicpm_cli.chat.lines import PipedLines
from minicpm_cli.chat.sessions import Sessions
from minicpm_cli.chat.terminal import Terminal, neutral
from minicpm_cli.errors import ContextOverflow, FileError, RequestError, UsageError
from minicpm_cli.llm.info import Speculated
from minicpm_cli.types import Event, Message, Request

Make = Callable[..., Chat]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def chat(llm: FakeLLM | None = None, **options: object) -> Chat:
        sessions = Sessions(tmp_path / "sessions")
        terminal = Terminal(io.StringIO(), io.StringIO())
        return Chat(llm or FakeLLM(), terminal, sessions, sessions.open("test"), "test", **options)  # type: ignore[arg-type]

    return chat


def contents(chat: Chat) -> list[str]:
    return [m.content for m in chat.conversation.messages]


def stored(chat: Chat) -> list[Turn]:
    """The turns of the session file."""
    return Sessions(chat.sessions.folder).open("test").turns


def told(chat: Chat) -> str:
    """What was said on stderr since the last call."""
    err = chat.terminal.err
    assert isinstance(err, io.StringIO)
    text = err.getvalue()
    err.seek(0)
    err.truncate()
    return text


class Lines:
    """Lines of a person; an exception in the list is raised in its place."""

    typed = True

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self._lines = list(lines)

    def read(self) -> str:
        line = self._lines.pop(0) if self._lines else EOFError
        if isinstance(line, str):
            return line
        raise line


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
    assert "the 2 oldest messages are not sent, from 'one' on" in told(chat)


def test_a_cut_reply_is_announced(make: Make) -> None:
    chat = make(given={"max_tokens": 2})
    chat.say("one")
    assert "cut at the limit" in told(chat)
    assert not chat.conversation.turns[-1].partial


def test_the_table_drives_help(make: Make) -> None:
    chat = make()
    commands.run(chat, "/help")
    said = told(chat)
    names = "/help /system /set /retry /undo /reset /save /load /sessions /file /stats /think /template /prompt /exit"
    for name in names.split():
        assert f"{name} " in said or f"{name}\n" in said


def test_set_shows_changes_resets_and_refuses(make: Make) -> None:
    chat = make()
    commands.run(chat, "/set temperature 0.25")
    commands.run(chat, "/set stop ###")
    commands.run(chat, "/set max-tokens 7")
    assert (chat.params.temperature, chat.params.stop, chat.params.max_tokens) == (0.25, ("###",), 7)
    commands.run(chat, "/set temperature default")
    assert chat.params.temperature == 1.0
    told(chat)
    commands.run(chat, "/set")
    assert "max_tokens = 7 (set)" in told(chat)
    for line in ("/set temperature -1", "/set temperature nan", "/set nope 1", "/set top_k 1.5"):
        with pytest.raises(UsageError):
            commands.run(chat, line)
    assert chat.params.temperature == 1.0


def test_commands_on_the_list(make: Make) -> None:
    chat = make()
    chat.say("one")
    chat.say("two")
    commands.run(chat, "/undo")
    assert contents(chat) == ["one", "You said: one"]
    commands.run(chat, "/system Be brief")
    commands.run(chat, "/reset")
    assert contents(chat) == ["Be brief"]
    commands.run(chat, "/system -")
    assert contents(chat) == []
    for line in ("/undo x", "/undo 0", "/nope", "/se", "/think maybe", "/load", "/file"):
        with pytest.raises(UsageError):
            commands.run(chat, line)


def test_save_and_load(make: Make, tmp_path: Path) -> None:
    chat = make()
    chat.say("one")
    commands.run(chat, "/save other")
    commands.run(chat, f"/save {tmp_path / 'copy.jsonl'}")
    commands.run(chat, "/reset")
    commands.run(chat, "/load other")
    assert contents(chat) == ["one", "You said: one"]
    commands.run(chat, "/undo")
    commands.run(chat, f"/load {tmp_path / 'copy.jsonl'}")
    assert contents(chat) == ["one", "You said: one"]
    told(chat)
    commands.run(chat, "/sessions")
    assert "* test" in told(chat)
    with pytest.raises(FileError):
        commands.run(chat, "/load missing")


def test_paths_that_cannot_be_used_are_an_error_of_the_user(make: Make, tmp_path: Path) -> None:
    chat = make()
    chat.say("one")
    (tmp_path / "folder.d").mkdir()
    before = sorted(tmp_path.iterdir())
    for line in (f"/save {tmp_path / 'folder.d'}", "/file ~no-such-user/x", "/load ~no-such-user/x.jsonl"):
        with pytest.raises((FileError, UsageError)):
            commands.run(chat, line)
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_goes_with_the_next_question_only(make: Make, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("inside\n")
    chat = make(FakeLLM(answer=lambda request: "ok"))
    commands.run(chat, f"/file {tmp_path / 'a.txt'}")
    chat.say("what?")
    chat.say("and?")
    assert contents(chat)[0] == f"{tmp_path / 'a.txt'}:\n```\ninside\n```\n\nwhat?"
    assert contents(chat)[2] == "and?"


def test_stats_think_template_and_prompt(make: Make) -> None:
    chat = make()
    chat.say("one")
    commands.run(chat, "/stats")
    shown = told(chat)
    assert "context: 4090 of 4096 tokens left" in shown
    assert "lookup" not in shown
    chat = make(FakeLLM(speculated=Speculated(drafts=4, proposed=20, accepted=9)))
    commands.run(chat, "/stats")
    assert "lookup: 9 of 20 expected tokens came, 2.2 more a step" in told(chat)
    commands.run(chat, "/think off")
    assert chat.params.think is False
    commands.run(chat, "/think default")
    assert chat.params.think is None
    told(chat)
    commands.run(chat, "/prompt")
    assert told(chat) == "<0><1><2><3><4><5>\n(6 tokens)\n"
    commands.run(chat, "/template")
    assert "chat template: none" in told(chat)


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


def test_neutral_text_moves_no_cursor() -> None:
    assert neutral("a\tb\n") == "a\tb\n"
    assert neutral("\x1b[2J\r\x08\x7f\x9b\u202e") == "␛[2J␍␈␡<U+009B><U+202E>"
    assert neutral("你好 👨‍👩‍👧") == "你好 👨‍👩‍👧"
