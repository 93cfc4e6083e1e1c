"""What a person does at the prompt of minicpm chat, on a real terminal with a fake model."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pexpect = pytest.importorskip("pexpect")

from spawned import PROMPT, Start, ask, leave, spawn  # noqa: E402
from talks import Editor  # noqa: E402


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Start]:
    """run(*arguments, rows=..., VARIABLE=...) -> the program at its first prompt."""
    running = []

    def start(*arguments: str, prompt: str = PROMPT, **options: object) -> pexpect.spawn:
        child = spawn(tmp_path, "chat", "--session", "s", *arguments, **options)  # type: ignore[arg-type]
        running.append(child)
        child.expect(prompt)
        return child

    yield start
    for child in running:
        child.close(force=True)


def said(folder: Path, session: str = "s") -> list[str]:
    lines = (folder / "data" / "sessions" / f"{session}.jsonl").read_text().splitlines()
    return [json.loads(line)["content"] for line in lines]


def until(child: pexpect.spawn, shown: str) -> list[str]:
    """The rows of the screen as soon as one of them holds `shown`."""
    for _ in range(300):
        child.expect([pexpect.TIMEOUT], timeout=0.05)
        rows = [text for text in child.logfile_read.screen if text]
        if any(shown in row for row in rows):
            return rows
    raise AssertionError(f"{shown!r} is not on the screen:\n" + child.logfile_read.text)


def tab(child: pexpect.spawn, typed: str, completed: str) -> None:
    """Types, and waits for what Tab makes of it."""
    child.send(typed)
    until(child, f"> {typed}")
    child.send("\t")
    until(child, f"> {completed}")


def test_the_whole_screen_after_questions_and_branches(run: Start) -> None:
    child = run()
    ask(child, "hello", "You said")
    ask(child, "/branch b", "now on s")
    ask(child, "/undo", "took back")
    ask(child, "/branch -", "goes back")
    child.send("next")
    assert until(child, "> next") == [
        "minicpm: fake, context 4096 tokens. /help lists commands, Ctrl-D leaves.",
        "> hello",
        "You said: hello",
        "> /branch b",
        "now on s+b, with 1 question; /branch - goes back",
        "> /undo",
        "took back 1 question; 0 left",
        "> /branch -",
        "now on s, with 1 question; /branch - goes back",
        "> next",
        " fake bf16 · 6 of 4,096 tokens (0%) · s",
    ]


def test_the_line_below_the_prompt(run: Start, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    child = run("-t", "0")
    ask(child, "hello", "You said")
    ask(child, "/file a.txt", "goes with")
    assert until(child, " fake bf16")[-1] == (" fake bf16 · 6 of 4,096 tokens (0%) · 4.0 tok/s · 1 file attached · s")
    assert leave(child) == 0
    assert "file attached" not in child.logfile_read.text, "it goes with the prompt"
    child = run(columns=40)
    assert until(child, " fake bf16")[-1] == " fake bf16 · 6 of 4,096 tokens (0%) · s"
    assert leave(child) == 0
    child = run("--plain")
    assert "4,096" not in child.logfile_read.text


def test_wide_characters_are_erased_whole(run: Start) -> None:
    """The window ends behind the third of them."""
    child = run("--plain", "-q", columns=8)
    child.send("你好世界")
    assert until(child, "界") == ["> 你好世", "  界"]
    child.send("\x7f\x7f!")
    assert until(child, "!") == ["> 你好!"]
    assert child.logfile_read.cursor == (7, 0)


def test_tab_completes_what_a_command_takes(run: Start, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("inside")
    child = run("--plain")
    ask(child, "hello", "You said")
    for typed, completed, rest, answer in (
        ("/sav", "/save", "other-one", "saved 2 messages"),
        ("/set temp", "/set temperature", " 0.5", r"temperature = 0\.5 \(set\)"),
        ("/set overflow dr", "/set overflow drop-oldest", "", "overflow = drop-oldest"),
        ("/retry temp", "/retry temperature=", "0.25", "You said"),
        ("/file not", "/file notes.txt", "", r"notes\.txt: \d+ tokens"),
        ("/help und", "/help undo", "", r"/undo \[N\]  take"),
        ("/load oth", "/load other-one", "", "loaded 2 messages from other-one"),
        ("/copy cod", "/copy code", " out", "no fenced code block"),
        ("/branch ma", "/branch main", "", "now on other-one"),
    ):
        tab(child, typed, completed)
        ask(child, rest, answer)
    assert leave(child) == 0


@pytest.mark.parametrize(("term", "prompt"), [("xterm", PROMPT), ("dumb", "> ")], ids=["xterm", "dumb"])
def test_three_quotes_hold_many_lines(run: Start, tmp_path: Path, term: str, prompt: str) -> None:
    child = run("--plain", TERM=term, prompt=prompt)
    for typed, answer in (
        ('"""one\rtwo\r"""', "You said: one"),
        ('"""a""" and """b', 'You said: """a""" and'),
        ('"""/undo"""', "You said: /undo"),
    ):
        child.send(f"{typed}\r")
        child.expect(answer)
        child.expect(prompt)
    assert leave(child) == 0
    assert said(tmp_path)[::2] == ["one\ntwo", '"""a""" and """b', "/undo"]


def test_an_editor_for_questions_and_replies(run: Start, tmp_path: Path, editor: Editor) -> None:
    editor("", "from\nthe editor\n")
    command = os.environ["EDITOR"]
    child = run("--plain", EDITOR=command)
    child.send("\x07")
    child.expect("the editor")
    ask(child, "!", "You said: from\r\nthe editor!")
    editor("draft", "second\n")
    ask(child, "/edit draft", "> ")
    ask(child, "", "You said: second")
    editor("You said: second", "I say this\n")
    ask(child, "/edit-reply", "the reply is changed")
    editor("", "lost", code=1)
    child.send("kept\x07")
    child.expect("kept")
    ask(child, "", "You said: kept")
    assert leave(child) == 0
    assert said(tmp_path)[2:] == ["second", "I say this", "kept", "You said: kept"]


def test_no_editor_is_an_error_that_says_what_to_do(run: Start) -> None:
    child = run("--plain", EDITOR="no-such-editor --wait")
    ask(child, "/edit", "cannot run the editor 'no-such-editor'")
    child.send("hello\x07")
    child.expect("cannot run the editor")
    ask(child, "", "You said: hello")
    assert leave(child) == 0


def test_a_paste_is_one_question_whatever_is_in_it(run: Start, tmp_path: Path) -> None:
    pasted = "\n".join(["first\\", "/undo", "\ttabbed", "", "//x", *(f"line {n}" for n in range(200))])
    child = run(rows=10)
    child.send(f"\x1b[200~{pasted}\x1b[201~")
    child.expect("line 199")
    child.send("\r")
    child.expect("You said")
    child.expect(PROMPT)
    assert leave(child) == 0
    assert said(tmp_path)[0] == pasted


def test_bytes_that_are_no_text(run: Start, tmp_path: Path) -> None:
    child = run("--plain")
    os.write(child.child_fd, b"a\xff\xfeb \xe4\xbd\xa0\r")
    child.expect("You said")
    child.expect(PROMPT)
    assert leave(child) == 0
    assert said(tmp_path)[0] == "a\ufffd\ufffdb 你"
    assert "+a\ufffd\ufffdb 你" in (tmp_path / "data" / "history").read_text()


def test_what_was_typed_is_found_again_and_is_private(run: Start, tmp_path: Path) -> None:
    history = tmp_path / "data" / "history"
    history.parent.mkdir()
    history.write_text("\n# 2025-01-01 00:00:00\n+older\n")
    history.chmod(0o644)
    child = run("--plain")
    ask(child, "first", "You said: first")
    assert leave(child) == 0
    assert history.stat().st_mode & 0o777 == 0o600
    child = run("--plain")
    child.send("\x1b[A\x1b[A")
    child.expect("older")
    ask(child, "", "You said: older")
    child.send("\x12fir")
    until(child, "> first")
    child.send("\r")
    until(child, "> first")
    child.send("\r")
    child.expect("You said: first")
    child.expect(PROMPT)
    assert leave(child) == 0


def test_a_history_that_cannot_be_written_stops_nobody(run: Start, tmp_path: Path) -> None:
    (tmp_path / "data" / "history").mkdir(parents=True)
    child = run("--plain")
    ask(child, "first", "You said: first")
    assert leave(child) == 0


def test_what_goes_when_the_context_is_full_is_asked_first(run: Start, tmp_path: Path) -> None:
    child = run("--plain", "--ctx", "16")
    ask(child, "one two", "You said: one two")
    ask(child, "three four", "You said: three four")
    child.send("five\r")
    child.expect("[0-9]+ tokens too many: 18 with what was said before, in a context of 16")
    child.expect(r"Without the oldest question, from 'one two' on \(8 tokens\)")
    child.expect("Leave that out")
    child.send("maybe\r")
    child.expect("Leave that out")
    child.send("no\r")
    child.expect("Nothing was sent")
    child.expect(PROMPT)
    assert len(said(tmp_path)) == 4
    child.send("\x1b[A")
    child.expect("five")
    child.send("\r")
    child.expect("Leave that out")
    child.send("y\r")
    child.expect(r"see the oldest question,\s+from\s+'one\s+two'\s+on any more")
    child.expect("You said: five")
    child.expect(PROMPT)
    assert leave(child) == 0
    assert len(said(tmp_path)) == 6, "what is not sent is kept"


def test_what_is_said_of_ctrl_c_has_a_row_of_its_own_on_a_dumb_terminal(run: Start) -> None:
    child = run(TERM="dumb", prompt="> ")
    child.sendintr()
    child.expect_exact("^C\r\n(Ctrl-C again, Ctrl-D or /exit leaves)\r\n")
    assert leave(child) == 0


def test_a_terminal_that_obeys_nothing_is_sent_nothing_to_obey(run: Start, tmp_path: Path) -> None:
    child = run("--ctx", "16", TERM="dumb", prompt="> ")
    child.logfile_read = raw = io.StringIO()
    for typed, answer in (
        ("one two", "You said: one two"),
        ("/stats", "context: 8 of 16 tokens left"),
        ("three\\\rfour", "You said: three\r\n"),
    ):
        child.send(f"{typed}\r")
        child.expect(answer)
        child.expect("> ")
    child.send("five\r")
    child.expect("Leave that out")
    child.send("y\r")
    child.expect("You said: five")
    child.expect("> ")
    assert leave(child) == 0
    assert "\x1b" not in raw.getvalue()
    assert said(tmp_path)[2] == "three\nfour"
