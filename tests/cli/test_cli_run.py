"""minicpm run: what goes in, what comes out, and on which stream."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Generator, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from fakes import FakeLLM
from minicpm_cli.chat.sessions import Sessions
from minicpm_cli.chat.terminal import Terminal
from minicpm_cli.cli import exit_code, opening
from minicpm_cli.cli.runtime import Runtime
from minicpm_cli.settings import Settings
from minicpm_cli.types import Event, Logprob, Message, Request


def asked(llm: FakeLLM) -> str:
    messages = llm.seen[-1].messages
    assert not isinstance(messages, str)
    return messages[-1].content


def test_the_answer_alone_is_on_stdout(cli) -> None:
    done = cli("run", "Hello", "there", stdin=b"")
    assert (done.code, done.out, done.err) == (0, "You said: Hello there\n", "")


def test_stdin_comes_after_a_blank_line_without_its_last_newline(cli) -> None:
    llm = FakeLLM()
    cli("run", "Summarize", stdin=b"  one \ntwo \n\n", llm=llm)
    assert asked(llm) == "Summarize\n\n  one \ntwo \n"


def test_what_never_ends_is_read_only_so_far(cli, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("minicpm_cli.chat.attach.MOST", 1 << 20)
    for done, name in (
        (cli("run", "-f", "/dev/zero", "hi"), "/dev/zero"),
        (cli("run", "hi", stdin=bytes(2 << 20)), "stdin"),
    ):
        assert done.code == 2
        assert f"{name} has more than 1 MiB" in done.err


def test_stdin_alone_is_the_prompt_to_the_byte(cli) -> None:
    llm = FakeLLM()
    cli("run", stdin="\ufeffThe answer is ".encode(), llm=llm)
    assert asked(llm) == "The answer is "
    cli("run", stdin=b"a\r\n", llm=llm)
    assert asked(llm) == "a"


def test_bytes_that_are_no_text_are_refused_with_their_place(cli) -> None:
    done = cli("run", stdin=b"abc\xff")
    assert done.code == 2
    assert "byte 0xff at offset 3" in done.err


def test_files_are_quoted_with_their_names(cli, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("x\n```\ny\n```\n")
    (tmp_path / "b.txt").write_text("z")
    llm = FakeLLM()
    cli("run", "-f", str(tmp_path / "a.md"), "-f", str(tmp_path / "b.txt"), "Compare", llm=llm)
    assert asked(llm) == "a.md:\n````\nx\n```\ny\n```\n````\n\nb.txt:\n```\nz\n```\n\nCompare"


def test_system_prompt_and_sampling_reach_the_model(cli) -> None:
    llm = FakeLLM()
    cli("run", "-s", "Be brief", "-t", "0.5", "--stop", "a", "--stop", "b", "--no-think", "hi", llm=llm)
    request = llm.seen[0]
    assert request.messages == (Message("system", "Be brief"), Message("user", "hi"))
    assert (request.params.temperature, request.params.stop, request.params.think) == (0.5, ("a", "b"), False)


def test_raw_sends_the_text_itself(cli) -> None:
    llm = FakeLLM()
    cli("run", "--raw", "Once upon", llm=llm)
    assert llm.seen[0].messages == "Once upon"


def test_the_prefill_begins_the_answer(cli) -> None:
    llm = FakeLLM(answer=lambda request: " 2, 3")
    assert cli("run", "--prefill", "1,", "count", llm=llm).out == "1, 2, 3\n"
    assert llm.seen[0].prefill == "1,"


def test_thinking_goes_to_stderr_and_is_dimmed_on_a_terminal(cli) -> None:
    llm = FakeLLM(thought=lambda request: "Hm.")
    done = cli("run", "hi", llm=llm)
    assert (done.out, done.err) == ("You said: hi\n", "Hm.\n")
    assert "\x1b[2mHm.\x1b[0m" in cli("run", "hi", llm=llm, tty=True).err
    assert "\x1b" not in cli("run", "--plain", "hi", llm=llm, tty=True).err


def test_leading_space_and_newlines_of_an_answer_stay(cli) -> None:
    assert cli("run", "hi", llm=FakeLLM(answer=lambda request: " a\n\n")).out == " a\n\n"


def test_control_characters_are_shown_on_a_terminal_and_kept_in_a_pipe(cli) -> None:
    nasty = "\x1b]0;owned\x07 \x1b[2J \x9b31m a\rb\x7f"
    llm = FakeLLM(answer=lambda request: nasty, thought=lambda request: nasty)
    assert cli("run", "hi", llm=llm).out == nasty + "\n"
    shown = cli("run", "hi", llm=llm, tty=True)
    for text in (shown.out, shown.err.replace("\x1b[2m", "").replace("\x1b[0m", "")):
        assert not any(c in text for c in "\x1b\x07\x9b\r\x7f")
    assert "␛]0;owned␇" in shown.out


def test_a_cut_answer_says_so(cli) -> None:
    done = cli("run", "-n", "2", "one two three")
    assert done.code == 0
    assert done.out == "You said:\n"
    assert "cut at 2 tokens" in done.err
    assert cli("run", "-q", "-n", "2", "one two three").err == ""


def test_a_cut_thought_says_so(cli) -> None:
    done = cli("run", "-n", "1", "hi", llm=FakeLLM(thought=lambda request: "a b c"))
    assert (done.out, done.code) == ("", 0)
    assert "still thinking" in done.err


@pytest.mark.parametrize(("thought", "said"), [("", "nothing in it"), ("a b c", "behind its thoughts")])
def test_an_answer_that_is_none_is_said(cli, thought: str, said: str) -> None:
    done = cli("run", "hi", llm=FakeLLM(answer=lambda request: "", thought=lambda request: thought))
    assert (done.out, done.code) == ("", 0)
    assert said in done.err
    assert "ended its answer" not in cli("run", "hi").err


def test_json_is_one_record(cli) -> None:
    done = cli("run", "--json", "--seed", "7", "hi", llm=FakeLLM(thought=lambda request: "Hm."))
    record = json.loads(done.out)
    assert done.out.count("\n") == 1
    assert done.err == ""
    assert record.pop("id").startswith("run-")
    assert record == {
        "model": "fake",
        "text": "You said: hi",
        "think": "Hm.",
        "finish_reason": "stop",
        "seed": 7,
        "usage": {"prompt_tokens": 2, "completion_tokens": 4, "cached_tokens": 0},
        "timings": {
            "load_seconds": 0.25,
            "first_token_seconds": 0.5,
            "prefill_tokens_per_second": 4.0,
            "decode_tokens_per_second": 6.0,
        },
    }


def test_extract_gives_the_last_block_alone(cli) -> None:
    text = "First:\n```sh\nls\n```\nThen\n~~~~py\na = '```'\n~~~~\nBye"
    assert cli("run", "-x", "hi", llm=FakeLLM(answer=lambda request: text)).out == "a = '```'\n"


def test_extract_without_a_block_gives_nothing_and_fails(cli) -> None:
    done = cli("run", "-x", "hi")
    assert (done.code, done.out) == (1, "")
    assert "You said: hi" in done.err


def test_show_prompt_as_a_record(cli) -> None:
    lines = [line.split("\t") for line in cli("run", "--show-prompt", "hi ä").out.splitlines()]
    done = cli("run", "--show-prompt", "--json", "hi ä")
    assert done.out.count("\n") == 1
    assert json.loads(done.out) == {
        "count": len(lines),
        "tokens": [int(ident) for ident, _ in lines],
        "token_strs": [json.loads(text) for _, text in lines],
    }


def test_show_prompt_lists_tokens_and_does_not_answer(cli) -> None:
    llm = FakeLLM()
    done = cli("run", "--show-prompt", "hi", llm=llm)
    assert done.out == '0\t"<0>"\n1\t"<1>"\n'
    assert not llm.seen


def test_continue_goes_on_with_the_last_conversation(cli) -> None:
    llm = FakeLLM()
    cli("run", "-s", "Be brief", "one", llm=llm)
    cli("run", "-c", "two", llm=llm)
    said: list[tuple[str, str]] = [
        ("system", "Be brief"),
        ("user", "one"),
        ("assistant", "You said: one"),
        ("user", "two"),
    ]
    assert [(m.role, m.content) for m in llm.seen[-1].messages] == said  # type: ignore[union-attr]
    cli("run", "three", llm=llm)
    assert len(llm.seen[-1].messages) == 1


def test_sessions_are_private_json_lines(cli, home: Path) -> None:
    cli("run", "one", llm=FakeLLM(thought=lambda request: "Hm."))
    path = home / "data" / "sessions" / "run.jsonl"
    assert path.stat().st_mode & 0o777 == 0o600
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["role"], r["content"], r.get("reasoning")) for r in records] == [
        ("user", "one", None),
        ("assistant", "You said: one", "Hm."),
    ]


def test_folders_are_private_also_under_a_loose_umask(cli, home: Path) -> None:
    before = os.umask(0)
    try:
        cli("run", "one")
    finally:
        os.umask(before)
    made = [home / "data", home / "data" / "sessions", home / "data" / "sessions" / "run.jsonl"]
    assert [path.stat().st_mode & 0o777 for path in made] == [0o700, 0o700, 0o600]


def test_nothing_is_kept_of_a_failed_run(cli, home: Path) -> None:
    def fail(request: Request) -> None:
        raise RuntimeError("x")

    cli("run", "one", llm=FakeLLM(answer=fail))  # type: ignore[arg-type]
    assert not list(home.glob("data/sessions/*"))


def test_the_demo_is_announced_only_where_nobody_chose(cli, monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(Terminal, "note", lambda self, text: said.append(text))
    terminal = Terminal(None, None)  # type: ignore[arg-type]
    opening._say_demo(Settings.load({}, environ={"MINICPM_MODEL": "demo"}), terminal)
    assert not said
    opening._say_demo(Settings.load({}, environ={}), terminal)
    assert "demo" in said[0]
    assert "minicpm4-0.5b" in said[0]


def test_habits_of_other_tools(cli) -> None:
    done = cli("run", "--trust-remote-code", "--model-path", "x", "hi")
    assert done.code == 0
    assert "not needed" in done.err


def test_notes_of_the_model_are_said_once_and_not_when_quiet(cli) -> None:
    llm = FakeLLM(notes=("trained sparse",))
    assert cli("run", "hi", llm=llm).err == "minicpm: trained sparse\n"
    assert cli("run", "-q", "hi", llm=llm).err == ""


def test_one_request_gets_one_seat_unless_the_user_says_otherwise(home: Path, monkeypatch) -> None:
    seats: list[int | None] = []

    def opened(settings: Settings, terminal: Terminal) -> FakeLLM:
        seats.append(settings.options.max_seqs)
        return FakeLLM()

    monkeypatch.setattr(sys, "stdin", None)
    exit_code(("run", "hi"), Runtime(open_llm=opened))
    exit_code(("run", "--max-seqs", "3", "hi"), Runtime(open_llm=opened))
    monkeypatch.setenv("MINICPM_MAX_SEQS", "auto")
    exit_code(("run", "hi"), Runtime(open_llm=opened))
    assert seats == [1, 3, None]


def test_the_model_is_closed_in_every_case(cli) -> None:
    llm = FakeLLM()
    cli("run", "hi", llm=llm)
    assert llm.closed
    broken = FakeLLM(context=1)
    assert cli("run", "hi", llm=broken).code == 2
    assert broken.closed


def test_a_conversation_that_is_open_in_a_chat_is_left_alone(cli, home: Path) -> None:
    cli("run", "first", stdin=b"")
    sessions = Sessions(home / "data" / "sessions")
    with sessions.claim("run"):
        for _ in range(2):
            assert cli("run", "second", stdin=b"").err == ""
        assert [m.content for m in sessions.open("run").messages] == ["first", "You said: first"]
        assert sorted(sessions.names()) == ["run", "run-2"]
        assert [m.content for m in sessions.open("run-2").messages] == ["second", "You said: second"]
        sessions.path("run-2").unlink()
        done = cli("run", "-c", "third", stdin=b"")
    assert (done.code, done.out) == (0, "You said: third\n")
    assert "run is open in a chat, so the conversation goes on as run-2" in done.err
    assert [m.content for m in sessions.open("run-2").messages][::2] == ["first", "third"]
    assert len(sessions.open("run").messages) == 2


def test_a_budget_that_ended_the_thinking_is_said(cli) -> None:
    llm = FakeLLM(thought=lambda request: "one two three four")
    done = cli("run", "--think-budget", "2", "Hi", stdin=b"", llm=llm)
    assert "the budget for thinking was used up" in done.err
    assert json.loads(cli("run", "--json", "--think-budget", "2", "Hi", stdin=b"", llm=llm).out)["think_budget_spent"]
    done = cli("run", "--json", "--think-budget", "9", "Hi", stdin=b"", llm=llm)
    assert "used up" not in done.err
    assert "think_budget_spent" not in json.loads(done.out)


def test_log_probabilities_are_told_with_the_text_of_their_tokens(cli) -> None:
    class Sure(FakeLLM):
        def stream(self, requests: Iterable[Request | None]) -> Generator[Event]:
            for event in super().stream(requests):
                yield replace(event, logprobs=(Logprob(7, -0.5, ((7, -0.5), (8, -math.inf))),)) if event.text else event

    done = cli("run", "--json", "--logprobs", "2", "Hi", stdin=b"", llm=Sure(answer=lambda request: "Hello"))
    places = [{"token": 7, "text": "<7>", "logprob": -0.5, "top": [[7, -0.5, "<7>"], [8, -9999.0, "<8>"]]}]
    assert json.loads(done.out)["logprobs"] == places, "and JSON has no infinity"


@pytest.mark.parametrize(("arguments", "row"), [([], "reading: 1 s"), (["-x"], "answering: 1 s"), (["-q"], "")])
def test_a_terminal_is_told_that_it_takes_its_time(cli, arguments: list[str], row: str) -> None:
    done = cli("run", *arguments, "Hi", llm=FakeLLM(answer=lambda request: "ok", delay=1.1), tty=True)
    assert row in done.err
    assert ("1 s" in done.err) is bool(row)
    assert done.err.count("\x1b[K") == 2 * bool(row), "and the row is erased"
