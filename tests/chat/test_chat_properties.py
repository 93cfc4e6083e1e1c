"""Whatever is typed and whatever is said: a command is done or refused, and a session file gives back what it got."""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fakes import FakeLLM
from minicpm_cli.chat import commands
from minicpm_cli.chat.chat import Chat
from minicpm_cli.chat.commands import COMMANDS, Leave
from minicpm_cli.chat.conversation import Conversation, Turn
from minicpm_cli.chat.made import Made, Source
from minicpm_cli.chat.overflow import fit, without
from minicpm_cli.chat.sessions import Sessions, Transcript
from minicpm_cli.chat.terminal import Terminal
from minicpm_cli.errors import ContextOverflow, MinicpmError
from minicpm_cli.types import Message, Usage

TEXT = st.text(max_size=40)
MADE = st.builds(
    Made,
    st.builds(Source, TEXT.filter(bool), st.none() | TEXT.filter(bool), TEXT, TEXT),
    st.dictionaries(st.sampled_from(["temperature", "top_p"]), st.floats(0, 1)),
    st.none() | st.integers(0, 2**63),
    st.none() | st.sampled_from(["stop", "length"]),
    st.none() | st.builds(Usage, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
    st.integers(0, 5),
    st.integers(0, 5),
    st.none() | TEXT,
)
ANSWER = st.builds(
    Turn,
    st.builds(Message, st.just("assistant"), TEXT, st.none() | TEXT),
    st.booleans(),
    st.none() | MADE,
    st.booleans(),
)
QUESTION = st.builds(Turn, st.builds(Message, st.sampled_from(["system", "user", "tool"]), TEXT))
TURNS = st.lists(QUESTION | ANSWER, max_size=6)
ARGUMENT = st.text(st.characters(exclude_characters="/~\\", exclude_categories=()), max_size=20)


@given(TURNS, st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_session_file_gives_back_what_it_got_and_loses_no_more_than_a_torn_line(
    turns: list[Turn], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.jsonl")
        conversation = Conversation(record=Transcript(path))
        for turn in turns:
            conversation.turns.append(turn)
            conversation._write(turn)
        if not turns:
            return
        assert Transcript(path).read() == turns
        written = path.read_bytes()
        cut = data.draw(st.integers(0, len(written)))
        path.write_bytes(written[:cut])
        whole = written[:cut].count(b"\n")
        read = Sessions(Path(folder)).open("a").turns
        assert read[:whole] == turns[:whole]
        assert len(read) <= whole + 1


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(0, 40), st.integers(0, 6))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_what_fits_has_the_system_prompt_and_the_last_question(roles: list[int], limit: int, least: int) -> None:
    names = ("user", "assistant", "user")
    messages = (Message("system", "s"), *(Message(names[role], "x" * role) for role in roles))  # type: ignore[arg-type]

    def count(kept: tuple[Message, ...]) -> int:
        return sum(len(message.content) + 1 for message in kept)

    alone = count(without(messages, len(messages)))
    if alone > limit:
        with pytest.raises(ContextOverflow, match=f"prompt {alone} "):
            fit(messages, count, limit, least)
        return
    kept, dropped = fit(messages, count, limit, least)
    assert count(kept) <= limit
    assert kept[0] == messages[0]
    assert kept == without(messages, dropped)
    questions = [message for message in messages if message.role == "user"]
    assert not questions or questions[-1] is next(m for m in reversed(kept) if m.role == "user")


@given(st.sampled_from([command.name for command in COMMANDS]), ARGUMENT)
@example("/set", "stop []")
@example("/set", "seed ١")
@example("/retry", "temperature=")
@example("/undo", "²")
@example("/file", "\x00")
@example("/branch", "x 0")
@settings(
    max_examples=400, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_command_is_done_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, argument: str
) -> None:
    monkeypatch.setenv("VISUAL", "true")
    monkeypatch.chdir(tmp_path)
    sessions = Sessions(tmp_path / "sessions")
    chat = Chat(FakeLLM(context=60), Terminal(io.StringIO(), io.StringIO()), sessions, Conversation(), "test")
    chat.conversation.turns = [Turn(Message("user", "q")), Turn(Message("assistant", "a"))]
    with contextlib.suppress(MinicpmError, Leave):
        commands.run(chat, f"{name} {argument}")
    chat.leave()
    assert chat.params is not None
