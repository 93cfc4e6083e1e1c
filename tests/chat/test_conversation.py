"""The list of messages, its session file, and what of it is sent when the context is full."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from minicpm_cli.chat.conversation import Conversation, Turn
from minicpm_cli.chat.made import Made, Source
from minicpm_cli.chat.overflow import fit
from minicpm_cli.chat.sessions import Sessions, Transcript
from minicpm_cli.errors import ContextOverflow, FileError, UsageError
from minicpm_cli.types import Message, Usage

TALK = (
    Message("system", "s"),
    Message("user", "q1"),
    Message("assistant", "a1"),
    Message("user", "q2"),
    Message("assistant", "a2"),
    Message("user", "q3"),
)


def talk(*messages: Message) -> Conversation:
    return Conversation([Turn(m) for m in messages or TALK])


def contents(conversation: Conversation) -> str:
    return " ".join(m.content for m in conversation.messages)


def test_undo_takes_whole_exchanges() -> None:
    conversation = talk()
    assert conversation.undo() == 1
    assert contents(conversation) == "s q1 a1 q2 a2"
    assert conversation.undo(9) == 2
    assert contents(conversation) == "s"
    assert conversation.undo() == 0


def test_an_answer_takes_the_place_of_the_one_before() -> None:
    conversation = talk(*TALK[:5])
    conversation.answer(Turn(Message("assistant", "x")))
    assert contents(conversation) == "s q1 a1 q2 x"
    conversation = talk()
    conversation.answer(Turn(Message("assistant", "a3")))
    assert contents(conversation) == "s q1 a1 q2 a2 q3 a3"


def test_what_was_left_out_stays_out_as_long_as_its_answer_stands() -> None:
    made = Made(Source("m"), dropped=2)
    conversation = talk()
    assert conversation.left_out == 0
    conversation.answer(Turn(Message("assistant", "a3"), made=made))
    conversation.add(Message("user", "q4"))
    assert conversation.left_out == 2
    conversation.undo(2)
    assert conversation.left_out == 0


def test_system_prompt_is_set_replaced_removed_and_outlives_a_reset() -> None:
    conversation = talk(*TALK[1:3])
    conversation.set_system("x")
    conversation.set_system("y")
    assert contents(conversation) == "y q1 a1"
    conversation.reset()
    assert contents(conversation) == "y"
    conversation.set_system(None)
    assert conversation.messages == ()


@pytest.mark.parametrize(
    ("limit", "kept", "dropped"), [(6, "s q1 a1 q2 a2 q3", 0), (5, "s q2 a2 q3", 2), (2, "s q3", 4)]
)
def test_the_oldest_exchanges_go_and_the_system_prompt_stays(limit: int, kept: str, dropped: int) -> None:
    messages, gone = fit(TALK, len, limit)
    assert (" ".join(m.content for m in messages), gone) == (kept, dropped)


def test_few_prompts_are_counted_to_find_what_fits() -> None:
    messages = tuple(Message("user" if n % 2 == 0 else "assistant", str(n)) for n in range(2001))
    counted = []
    kept, dropped = fit(messages, lambda kept: counted.append(kept) or len(kept), 301)  # type: ignore[func-returns-value]
    assert (len(kept), dropped) == (301, 1700)
    assert len(counted) < 12


def test_a_question_that_is_too_long_alone_is_an_error() -> None:
    with pytest.raises(ContextOverflow, match="prompt 2"):
        fit(TALK, len, 1)


def test_the_file_is_the_list_after_every_change(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path / "sessions")
    conversation = sessions.open("a")

    def stored() -> list[Turn]:
        return sessions.open("a").turns

    conversation.add(Message("user", "q\u2028\x1b\n"))
    assert stored() == conversation.turns
    conversation.add(Message("assistant", "a", "why"), partial=True)
    assert stored() == [Turn(Message("user", "q\u2028\x1b\n")), Turn(Message("assistant", "a", "why"), True)]
    for change in (
        lambda: conversation.set_system("s"),
        lambda: conversation.answer(Turn(Message("assistant", "b"))),
        conversation.undo,
        conversation.reset,
    ):
        change()
        assert stored() == conversation.turns
    path = sessions.path("a")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in path.parent.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize("tail", [b'{"role": "us', b'{"role": "user", "content": "\xe4\xb8', b""])
def test_a_torn_last_line_is_left_out(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"role": "user", "content": "q"}\n' + tail)
    assert Transcript(path).read() == [Turn(Message("user", "q"))]


def test_a_last_line_without_its_newline_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"role": "user", "content": "q"}')
    assert Transcript(path).read() == [Turn(Message("user", "q"))]


@pytest.mark.parametrize("line", ["{bad", "[]", '{"role": "pope", "content": "x"}', '{"role": "user", "content": 1}'])
def test_any_other_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"role": "user", "content": "q"}}\n{line}\n{{"role": "user", "content": "q"}}\n')
    with pytest.raises(FileError, match="line 2"):
        Transcript(path).read()


def test_a_torn_line_does_not_swallow_what_is_added_after_it(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path)
    sessions.path("a").write_bytes(b'{"role": "user", "content": "q"}\n{"role": "as')
    conversation = sessions.open("a")
    conversation.add(Message("assistant", "a"))
    assert [turn.message.content for turn in sessions.open("a").turns] == ["q", "a"]


@pytest.mark.parametrize("name", ["", ".hidden", "../x", "a/b", "a\0b", "x" * 101, "a b"])
def test_names_that_are_no_file_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot name a session"):
        Sessions(tmp_path).path(name)


def test_names_newest_first_and_fresh_ones_are_new(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path)
    with pytest.raises(UsageError, match="no conversation"):
        sessions.latest()
    first = sessions.fresh()
    for name in (first, "会议"):
        sessions.open(name).add(Message("user", "x"))
    assert sessions.names() == ["会议", first]
    assert sessions.latest() == "会议"
    assert sessions.fresh() != first


def test_a_record_is_one_line_of_json(tmp_path: Path) -> None:
    Sessions(tmp_path).open("a").add(Message("user", "one\ntwo"))
    (line,) = (tmp_path / "a.jsonl").read_text().splitlines()
    assert set(json.loads(line)) == {"role", "content", "time"}


OLDER = (
    b'{"role": "system", "content": "s", "time": 1700000000}\n'
    b'{"role": "user", "content": "q", "time": 1700000001}\n'
    b'{"role": "assistant", "content": "a", "reasoning": "r", "partial": true, "time": 1700000002}\n'
)
MADE = Made(
    Source("demo", "abc", "Q4_1", "cpu", {"ctx": 1024}, 1_700_000_000),
    {"temperature": 0.5, "stop": ["x"]},
    7,
    "stop",
    Usage(3, 4, 1),
    dropped=2,
    given=5,
    system="",
    begun=Made(Source("demo"), seed=8),
)


def test_a_transcript_of_an_older_version_loads_and_goes_on(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path)
    sessions.path("old").write_bytes(OLDER)
    conversation = sessions.open("old")
    assert [turn.made for turn in conversation.turns] == [None] * 3
    conversation.add(Message("user", "q2"))
    assert sessions.path("old").read_bytes().startswith(OLDER)
    conversation.undo()
    assert sessions.path("old").read_bytes() == OLDER, "times and marks of what stays are kept"


def test_how_an_answer_was_made_is_kept(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path)
    conversation = sessions.open("a")
    conversation.add(Message("user", "q"))
    conversation.answer(Turn(Message("assistant", "a"), made=MADE))
    conversation.add(Message("assistant", "b"), edited=True)
    assert sessions.open("a").turns == conversation.turns
    assert sessions.open("a").turns[1].made == MADE
    record = json.loads(sessions.path("a").read_text().splitlines()[1])
    assert (record["model"], record["seed"], record["settings"]["temperature"]) == ("demo", 7, 0.5)


@pytest.mark.parametrize(
    "change",
    [
        {"model": 1},
        {"settings": []},
        {"seed": "x"},
        {"usage": {"prompt_tokens": "x"}},
        {"dropped": "x"},
        {"load": 3},
        {"begun": {"model": 3}},
    ],
)
def test_what_another_version_writes_costs_no_message(tmp_path: Path, change: dict[str, object]) -> None:
    sessions = Sessions(tmp_path)
    conversation = sessions.open("a")
    conversation.answer(Turn(Message("assistant", "a"), made=MADE))
    record = json.loads(sessions.path("a").read_text())
    sessions.path("a").write_text(json.dumps(record | change | {"unknown": [1]}) + "\n")
    assert sessions.open("a").messages == (Message("assistant", "a"),)


@pytest.mark.parametrize("cut", range(1, 60))
def test_a_session_torn_anywhere_in_its_last_line_keeps_the_others(tmp_path: Path, cut: int) -> None:
    sessions = Sessions(tmp_path)
    sessions.path("a").write_bytes(OLDER[:-cut])
    conversation = sessions.open("a")
    conversation.add(Message("user", "more"))
    kept = ["s", "q"] if cut > 1 else ["s", "q", "a"]
    assert [m.content for m in sessions.open("a").messages] == [*kept, "more"]


def test_branches_are_sessions_of_their_own(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path)
    assert sessions.branch("a", "x") == "a+x"
    assert sessions.branch("a+x", "y") == "a+y"
    assert sessions.branch("a+x", "main") == "a"
    for name in ("a+x", "a+y", "ab", "a", "b+x"):
        sessions.open(name).add(Message("user", "x"))
    assert sessions.branches("a+x") == ["main", "y", "x"]
    for name in ("a+", "+a", "a+b+c", "a+.b", "会" * 80):
        with pytest.raises(UsageError, match="cannot name"):
            sessions.path(name)


def test_a_list_of_sessions_says_what_they_are_about(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path)
    sessions.open("a").add(Message("user", "How\nare  you? " * 9))
    sessions.path("b").write_text("{bad\n{}\n")
    os.utime(sessions.path("a"), (0, 1))
    first, second = (f"{summary.name}  {summary.told()}" for summary in sessions.summaries())
    assert first == "b  now, 0 questions: (not readable)"
    assert second.endswith("days ago, 1 question: How are you? How are you? How are you? H")


def test_a_line_as_deep_as_no_parser_goes(tmp_path: Path) -> None:
    (tmp_path / "deep.jsonl").write_text("[" * 100_000 + "\n")
    sessions = Sessions(tmp_path)
    with pytest.raises(FileError, match=r"deep.jsonl, line 1 is not a message"):
        sessions.open("deep")
    assert [summary.first for summary in sessions.summaries()] == ["(not readable)"]


def test_files_that_no_session_can_be_called_are_no_sessions(tmp_path: Path) -> None:
    for name in (b"a.jsonl", b"two words.jsonl", b"b\xffd.jsonl"):
        (tmp_path / os.fsdecode(name)).write_text('{"role": "user", "content": "hi"}\n')
    assert Sessions(tmp_path).names() == ["a"]
    assert Sessions(tmp_path).latest() == "a"


def test_half_a_surrogate_pair_does_not_spoil_a_session(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"role": "user", "content": "x \\ud800 \\ud83d\\ude00"}\n')
    assert Sessions(tmp_path).open("a").messages == (Message("user", "x \ufffd \U0001f600"),)
