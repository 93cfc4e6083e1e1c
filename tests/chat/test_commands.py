"""What each command does to a conversation with a fake model, and what it says."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path

import pytest
from talks import Editor, Lines, Make, contents, stored, told

from fakes import FakeLLM, rendered
from minicpm_cli.chat import commands, repl
from minicpm_cli.chat.commands import COMMANDS
from minicpm_cli.chat.lines import PipedLines
from minicpm_cli.chat.terminal import Terminal
from minicpm_cli.errors import FileError, UsageError
from minicpm_cli.llm.info import Speculated
from minicpm_cli.types import Message


def test_the_table_drives_help(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = make()
    monkeypatch.setenv("COLUMNS", "120")
    commands.run(chat, "/help")
    said = told(chat)
    assert [line.split()[0] for line in said.splitlines()[: len(COMMANDS)]] == [each.name for each in COMMANDS]
    names = (
        "/help /system /set /retry /continue /edit-reply /undo /branch /reset /save /load /sessions /file /copy /edit "
        "/stats /think /template /prompt /exit"
    )
    assert {each.name for each in COMMANDS} >= set(names.split())
    commands.run(chat, "/help undo")
    assert told(chat).startswith("/undo [N]  take back")
    for columns in (80, 40):
        monkeypatch.setenv("COLUMNS", str(columns))
        commands.run(chat, "/help")
        assert max(map(len, told(chat).splitlines())) < columns


@pytest.mark.parametrize(
    ("line", "near"),
    [("/unod", "Did you mean /undo?"), ("/sats", "Did you mean /stats?"), ("/S", ""), ("/xyzzy", "/help lists them")],
)
def test_an_unknown_command_names_the_nearest(make: Make, line: str, near: str) -> None:
    with pytest.raises(UsageError, match="unknown command") as raised:
        commands.run(make(), line)
    assert near in str(raised.value)


def test_the_beginning_of_a_command_will_do_where_it_is_the_only_one(make: Make) -> None:
    chat = make()
    commands.run(chat, "/sta")
    assert "context:" in told(chat)
    with pytest.raises(UsageError, match="Did you mean /set or /sessions"):
        commands.run(chat, "/se")


@pytest.mark.parametrize("text", ["/usr/bin/env python", "/* a comment */", "/", "/1", "//help", "/etc/passwd", "/a.b"])
def test_a_path_is_no_command(make: Make, text: str) -> None:
    chat = make()
    assert repl.run(chat, Lines(text)) == 0
    assert contents(chat)[0] == text.removeprefix("/" if text.startswith("//") else "")


def test_set_shows_changes_resets_and_refuses(make: Make) -> None:
    chat = make()
    commands.run(chat, "/set temperature 0.25")
    commands.run(chat, "/set stop ###")
    commands.run(chat, "/set --max-tokens 7")
    assert (chat.params.temperature, chat.params.stop, chat.params.max_tokens) == (0.25, ("###",), 7)
    commands.run(chat, "/set temperature default")
    assert chat.params.temperature == 1.0
    told(chat)
    commands.run(chat, "/set")
    rows = {row.split()[0]: row.partition("= ")[2] for row in told(chat).splitlines()}
    assert (rows["max_tokens"], rows["temperature"], rows["overflow"]) == ("7 (set)", "1.0 (default)", "stop")
    assert (rows["stop"], rows["ignore_eos"], rows["seed"]) == ('["###"] (set)', "off (default)", "unset (default)")
    assert "logprobs" not in rows, "a chat shows none"
    commands.run(chat, '/set stop ["a b", "\\n"]')
    assert chat.params.stop == ("a b", "\n")
    commands.run(chat, '/set logit_bias {"7": -2.5}')
    assert told(chat).splitlines()[-1] == 'logit_bias = {"7": -2.5} (set)'
    commands.run(chat, "/set overflow drop-oldest")
    commands.run(chat, "/set verbose on")
    assert (chat.overflow, chat.terminal.verbose) == ("drop-oldest", True)
    commands.run(chat, "/set verbose default")
    assert not chat.terminal.verbose


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("temperature -1", "temperature is -1; it must be a number in"),
        ("temperature nan", "temperature is nan"),
        ("temperature warm", "temperature is 'warm'; it must be a number in"),
        ("temperature 0,9", "temperature is '0,9'"),
        ("top_p 1.5", "it must be a number in"),
        ("top_k 1.5", "it must be a whole number"),
        ("seed -1", "seed is -1; it must be a whole number"),
        ("think maybe", "think is 'maybe'; it must be true or false"),
        ("stop []]", None),
        ("overflow push", "it must be one of stop, drop-oldest"),
        ("plain maybe", "plain is 'maybe'"),
        ("tempreature 1", "Did you mean temperature?"),
        ("nope 1", "Settings: temperature"),
    ],
)
def test_set_is_checked_as_the_flags_are(make: Make, line: str, why: str | None) -> None:
    chat = make()
    if why is None:
        commands.run(chat, f"/set {line}")
        return
    before = chat.params
    with pytest.raises(UsageError) as raised:
        commands.run(chat, f"/set {line}")
    assert why in str(raised.value)
    assert chat.params == before


def test_retry_takes_settings_for_once(make: Make) -> None:
    llm = FakeLLM()
    chat = make(llm, given={"seed": 5})
    chat.say("one")
    told(chat)
    commands.run(chat, "/retry")
    assert "with seed 5 the answer stays the same" in told(chat)
    commands.run(chat, '/retry temperature=0.9 --top-p=0.5 stop="You said"')
    params = llm.seen[-1].params
    assert (params.temperature, params.top_p, params.stop) == (0.9, 0.5, ("You said",))
    assert chat.given == {"seed": 5}
    for line in ("/retry temperature", "/retry temperature=hot", "/retry nope=1", '/retry "'):
        with pytest.raises(UsageError):
            commands.run(chat, line)
    assert len(llm.seen) == 3


def test_commands_on_the_list(make: Make) -> None:
    chat = make()
    chat.say("one")
    chat.say("two")
    commands.run(chat, "/undo")
    assert contents(chat) == ["one", "You said: one"]
    commands.run(chat, "/system Be brief\nand kind")
    commands.run(chat, "/reset")
    assert contents(chat) == ["Be brief\nand kind"]
    commands.run(chat, "/system -")
    assert contents(chat) == []
    chat.conversation.before_reset.clear()
    told(chat)
    commands.run(chat, "/undo")
    assert told(chat) == "there is no question to take back\n"
    for line in ("/undo x", "/undo 0", "/undo 9999999999", "/think maybe", "/load", "/branch +", "/copy", "/retry"):
        with pytest.raises(UsageError):
            commands.run(chat, line)


def test_a_reset_can_be_taken_back(make: Make) -> None:
    chat = make()
    chat.conversation.set_system("brief")
    chat.say("one")
    said = contents(chat)
    commands.run(chat, "/reset")
    commands.run(chat, "/reset")
    assert [turn.message.content for turn in stored(chat)] == ["brief"]
    chat.say("two")
    commands.run(chat, "/undo")
    commands.run(chat, "/undo")
    assert contents(chat) == said
    assert [turn.message.content for turn in stored(chat)] == said
    commands.run(chat, "/undo")
    commands.run(chat, "/undo")
    assert contents(chat) == ["brief"]


def test_branches(make: Make) -> None:
    chat = make()
    for question in ("one", "two", "three"):
        chat.say(question)
    trunk = contents(chat)
    commands.run(chat, "/branch paris 2")
    assert contents(chat) == trunk[:2]
    chat.say("other")
    assert chat.name == "test+paris"
    commands.run(chat, "/branch -")
    assert (chat.name, contents(chat)) == ("test", trunk)
    commands.run(chat, "/branch paris")
    assert contents(chat) == [*trunk[:2], "other", "You said: other"]
    commands.run(chat, "/branch rome")
    commands.run(chat, "/undo")
    commands.run(chat, "/branch main")
    assert contents(chat) == trunk
    told(chat)
    commands.run(chat, "/branch")
    assert told(chat).splitlines()[0] == "* main"
    assert chat.sessions.branches("test+rome") == ["main", "rome", "paris"]
    for line in ("/branch paris 1", "/branch a/b", "/branch .x", "/branch new x"):
        with pytest.raises(UsageError):
            commands.run(chat, line)
    assert chat.name == "test"


def test_a_reply_is_edited_and_gone_on_with(make: Make, editor: Editor) -> None:
    llm = FakeLLM()
    chat = make(llm)
    with pytest.raises(UsageError, match="no reply to edit"):
        commands.run(chat, "/edit-reply")
    chat.say("one")
    editor("You said: one", "I say")
    commands.run(chat, "/edit-reply")
    assert contents(chat) == ["one", "I say"]
    assert stored(chat)[-1].edited
    llm.answer = lambda request: " more"
    commands.run(chat, "/continue max_tokens=5")
    assert rendered(llm.seen[-1]) == "user one I say"
    assert contents(chat) == ["one", "I say more"]
    editor("", "", code=1)
    commands.run(chat, "/edit-reply")
    assert contents(chat) == ["one", "I say more"]


def test_a_question_from_the_editor_is_on_the_line(make: Make, editor: Editor) -> None:
    editor("x", "a\nb\n")
    lines = Lines("/edit x", "")
    assert repl.run(make(), lines) == 0
    assert lines.drafts[:2] == ["", "a\nb"]


def test_save_and_load(make: Make, tmp_path: Path) -> None:
    chat = make()
    chat.say("one")
    commands.run(chat, "/save other")
    commands.run(chat, f"/save {tmp_path / 'copy.jsonl'}")
    commands.run(chat, "/undo")
    commands.run(chat, "/load other")
    assert contents(chat) == ["one", "You said: one"]
    chat.say("two")
    commands.run(chat, f"/load {tmp_path / 'copy.jsonl'}")
    assert contents(chat) == ["one", "You said: one"]
    assert chat.sessions.open("other").questions == 2, "what was said before stays where it was"
    told(chat)
    commands.run(chat, "/sessions")
    shown = told(chat)
    assert f"* {chat.name}  now, 1 question: one" in shown
    for columns, row in ((26, f"* {chat.name}  now,…"), (4, f"* {chat.name}…")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chat.terminal.err, "isatty", lambda: True)
            patch.setattr(Terminal, "columns", columns)
            commands.run(chat, "/sessions")
        assert row in told(chat).splitlines(), "one row each, in which the name is whole"
    assert f"  {'other':<{len(chat.name)}}  now, 2 questions: one" in shown
    with pytest.raises(FileError, match="no session 'missing'"):
        commands.run(chat, "/load missing")


def test_a_session_that_is_open_elsewhere_is_not_saved_over(make: Make) -> None:
    chat = make()
    chat.say("Hello")
    commands.run(chat, "/save other")
    with chat.sessions.claim("other"), pytest.raises(UsageError, match="'other' is open in another"):
        commands.run(chat, "/save -f other")
    commands.run(chat, "/save -f other")


def test_what_is_no_file_is_not_replaced_by_one(make: Make, tmp_path: Path) -> None:
    """A rename onto /dev/null would be the end of it."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "file.jsonl")
    chat = make()
    chat.say("Hello")
    for path in (tmp_path / "pipe.jsonl", tmp_path, "/dev/null"):
        with pytest.raises(UsageError, match="is a folder or a device"):
            commands.run(chat, f"/save -f {path}")
    assert (tmp_path / "pipe.jsonl").is_fifo()
    commands.run(chat, f"/save {tmp_path}/link.jsonl")
    assert (tmp_path / "link.jsonl").is_symlink()
    assert (tmp_path / "file.jsonl").is_file()


def test_a_conversation_is_saved_as_text_to_read(make: Make, tmp_path: Path) -> None:
    chat = make()
    chat.conversation.set_system("brief")
    chat.say("one")
    path = tmp_path / "talk.md"
    commands.run(chat, f"/save {path}")
    assert path.read_text() == "## system\n\nbrief\n\n## user\n\none\n\n## assistant\n\nYou said: one\n"
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UsageError, match="/save -f"):
        commands.run(chat, f"/save {path}")
    commands.run(chat, f"/save -f {path}")


@pytest.mark.parametrize("habit", ["/?", "/clear", "/regen", "/show", "/read -"])
def test_names_of_other_programs_work(make: Make, habit: str) -> None:
    chat = make()
    chat.say("one")
    commands.run(chat, habit)
    for bye in ("/bye", "/quit"):
        with pytest.raises(commands.Leave):
            commands.run(chat, bye)


def test_another_conversation_is_not_written_over(make: Make) -> None:
    chat = make()
    chat.say("one")
    commands.run(chat, "/save other")
    chat.say("two")
    commands.run(chat, "/save other")  # all that is there is here
    commands.run(chat, "/reset")
    chat.say("three")
    with pytest.raises(UsageError, match="/save -f other replaces it"):
        commands.run(chat, "/save other")
    assert chat.sessions.open("other").questions == 2
    commands.run(chat, "/save -f other")
    assert chat.sessions.open("other").questions == 1


def test_paths_that_cannot_be_used_are_an_error_of_the_user(make: Make, tmp_path: Path) -> None:
    chat = make()
    chat.say("one")
    (tmp_path / "folder.d").mkdir()
    before = sorted(tmp_path.iterdir())
    for line in (
        f"/save {tmp_path / 'folder.d'}",
        "/save -f " + str(tmp_path / "folder.d"),
        "/file ~no-such-user/x",
        "/load ~no-such-user/x.jsonl",
        f"/file {tmp_path}",
        f"/copy {tmp_path}",
        "/file /dev/zero",
        "/file a\0b",
        "/load a\0b",
        "/copy a\0b",
        "/save " + "x" * 400,
        "/load " + "会" * 100,
    ):
        with pytest.raises((FileError, UsageError)):
            commands.run(chat, line)
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_goes_with_the_next_question_only(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "a b.txt"
    path.write_text("two words\n")
    chat = make(FakeLLM(answer=lambda request: "ok"))
    commands.run(chat, f"/file {path}")
    size = len(f"{path}:".split()) + 4
    assert told(chat).splitlines() == [
        f"{path}: {size} tokens (10 characters); it goes with your next question",
        f"{4096 - size:,} tokens of the context of 4096 are left then",
    ]
    chat.say("what?")
    chat.say("and?")
    assert contents(chat)[0] == f"{path}:\n```\ntwo words\n```\n\nwhat?"
    assert contents(chat)[2] == "and?"


def test_files_are_listed_quoted_and_sent_away(make: Make, tmp_path: Path) -> None:
    for name in ("a b.txt", "c.txt"):
        (tmp_path / name).write_text("inside\n")
    chat = make()
    commands.run(chat, f"/file '{tmp_path}/a b.txt' {tmp_path}/c.txt")
    assert [Path(name).name for name, _ in chat.attached] == ["a b.txt", "c.txt"]
    told(chat)
    commands.run(chat, "/file")
    assert f"{tmp_path}/c.txt: 4 tokens" in told(chat)
    commands.run(chat, "/file -")
    assert chat.attached == []


def test_a_file_that_does_not_fit_is_refused_or_said_before_it_is_sent(make: Make, tmp_path: Path) -> None:
    (tmp_path / "big.txt").write_text("x " * 50)
    (tmp_path / "small.txt").write_text("x " * 20)
    chat = make(FakeLLM(context=40, answer=lambda request: "ok"))
    with pytest.raises(UsageError, match="100 characters do not fit the context of 40 tokens"):
        commands.run(chat, f"/file {tmp_path}/big.txt")
    assert chat.attached == []
    chat.say(" ".join("y" * 20))
    commands.run(chat, f"/file {tmp_path}/small.txt")
    assert "7 tokens more than the context of 40 has left" in told(chat)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x89PNG\r\n\x1a\n\0\0", "is a binary file (PNG image)"),
        (b"%PDF-1.7\n", "is a binary file (PDF)"),
        (b"GIF89a\1\0\1", "is a binary file (GIF image)"),
        (b"abc\0def", "is a binary file. Only text"),
        (b"\xff\xfea\0", "is UTF-16 text. Convert it first"),
        (b"abc\xff", "is not UTF-8: byte 0xff at offset 3"),
    ],
)
def test_binary_files_are_refused(make: Make, tmp_path: Path, data: bytes, why: str) -> None:
    (tmp_path / "x").write_bytes(data)
    chat = make()
    with pytest.raises(UsageError) as raised:
        commands.run(chat, f"/file {tmp_path / 'x'}")
    assert why in str(raised.value)
    assert chat.attached == []


class _Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_copy_sets_the_clipboard_of_the_terminal(make: Make) -> None:
    chat = make(FakeLLM(answer=lambda request: "Ja 你好:\n```\nx = 1\n```\n"))
    chat.say("one")
    with pytest.raises(UsageError, match="no terminal"):
        commands.run(chat, "/copy")
    chat.terminal.err = err = _Tty()
    commands.run(chat, "/copy")
    commands.run(chat, "/copy code")
    first, second = (part.split("\a")[0] for part in err.getvalue().split("\x1b]52;c;")[1:])
    assert base64.b64decode(first).decode() == "Ja 你好:\n```\nx = 1\n```\n"
    assert base64.b64decode(second).decode() == "x = 1"
    chat.conversation.add(Message("assistant", "x" * 80_000))
    with pytest.raises(UsageError, match="more than terminals take"):
        commands.run(chat, "/copy")


def test_copy_to_a_file(make: Make, tmp_path: Path) -> None:
    chat = make()
    chat.say("one")
    path = tmp_path / "reply one.txt"
    commands.run(chat, f"/copy {path}")
    assert path.read_text() == "You said: one\n"
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UsageError, match="/copy -f"):
        commands.run(chat, f"/copy {path}")
    commands.run(chat, f"/copy -f {path}")
    with pytest.raises(UsageError, match="no fenced code block"):
        commands.run(chat, f"/copy code {path}")


def test_stats_think_template_and_prompt(make: Make) -> None:
    chat = make()
    chat.say("one")
    commands.run(chat, "/stats")
    shown = told(chat)
    assert "1 reply in all: 2 tokens in (0 cached, 0%), 3 out" in shown
    assert "context: 4090 of 4096 tokens left" in shown
    assert "GB of main memory at the most" in shown
    assert "lookup" not in shown
    chat = make(FakeLLM(speculated=Speculated(drafts=4, proposed=20, accepted=9)))
    commands.run(chat, "/stats")
    assert "lookup: 9 of 20 expected tokens came, 2.2 more a step" in told(chat)
    commands.run(chat, "/think off")
    assert chat.params.think is False
    commands.run(chat, "/think on")
    assert "no switch" not in told(chat)
    chat.llm = FakeLLM(template_source="{{ messages }}")
    commands.run(chat, "/think on")
    assert told(chat).endswith("the chat template has no switch for it, so that changes nothing\n")
    commands.run(chat, "/think default")
    assert chat.params.think is None
    told(chat)
    commands.run(chat, "/prompt")
    assert told(chat) == "0:'<0>'  1:'<1>'  2:'<2>'  3:'<3>'  4:'<4>'  5:'<5>'\n(6 tokens)\n"
    commands.run(chat, "/prompt and more")
    assert told(chat).endswith("(9 tokens)\n")
    commands.run(chat, "/template")
    assert "chat template: none" in told(chat)


def test_an_editor_takes_nothing_of_a_pipe(make: Make, editor: Editor) -> None:
    editor("x", "from the editor\n")
    chat = make()
    assert repl.run(chat, PipedLines(io.BytesIO(b"/edit x\nfrom the pipe\n"))) == 0
    assert contents(chat)[::2] == ["from the editor", "from the pipe"]
