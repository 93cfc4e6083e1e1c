"""minicpm chat as a command: what it refuses, what it keeps, and --replay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes import FakeLLM
from minicpm_cli.chat.sessions import Sessions
from minicpm_cli.cli import chatting
from minicpm_cli.types import Event, Message, Request


def seeded(request: Request) -> str:
    """An answer that its seed and temperature decide."""
    last = request.messages[-1].content  # type: ignore[union-attr]
    return f"{last} {request.params.seed} {request.params.temperature}"


def records(home: Path, name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (home / "data" / "sessions" / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--overflow", "push"),
        ("-c", "--session", "a"),
        ("--replay", "a", "-c"),
        ("--replay", "a", "-s", "x"),
        ("--session", "a/b"),
        ("--session", ""),
        ("-c",),
        ("-t", "-1"),
    ],
)
def test_what_cannot_be_is_refused_before_loading(cli, arguments: tuple[str, ...]) -> None:
    done = cli("chat", *arguments, stdin=b"")
    assert (done.code, done.opened) == (2, False)


def test_a_session_that_is_not_there_cannot_be_replayed(cli) -> None:
    done = cli("chat", "--replay", "nope", stdin=b"")
    assert (done.code, done.opened) == (3, False)
    assert "there is no session 'nope' in " in done.err


def test_the_record_of_an_answer(cli, home: Path) -> None:
    done = cli("chat", "--session", "a", "-t", "0.5", "--ctx", "100", stdin=b"hello\n", llm=FakeLLM(answer=seeded))
    assert done.code == 0
    question, answer = records(home, "a")
    assert question["content"] == "hello"
    assert {name: answer[name] for name in ("model", "load", "settings", "finish")} == {
        "model": "fake",
        "load": {"ctx": 100},
        "settings": {"temperature": 0.5},
        "finish": "stop",
    }
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "cached_tokens": 0}
    assert f"hello {answer['seed']} 0.5" == answer["content"]


def test_a_session_is_held_again(cli, home: Path) -> None:
    script = b"/system brief\nhello\n/retry temperature=0.25\nand\n/set top_p 0.5\nmore\n/continue\n"
    assert cli("chat", "--session", "a", "-t", "0.5", stdin=script, llm=FakeLLM(answer=seeded)).code == 0
    done = cli("chat", "--replay", "a", "--session", "b", stdin=b"", llm=FakeLLM(answer=seeded))
    assert done.code == 0, done.err
    assert "3 of 3 answers are as they were; this is session b" in done.err
    assert "> hello" in done.err
    before, again = records(home, "a"), records(home, "b")
    assert [turn["content"] for turn in before] == [turn["content"] for turn in again]
    assert [turn.get("seed") for turn in before] == [turn.get("seed") for turn in again]
    assert cli("chat", "--replay", "a", "--session", "b", stdin=b"").code == 2


def test_a_flag_changes_the_replay_and_the_difference_is_said(cli, home: Path) -> None:
    (home / "config.toml").write_text("temperature = 0.75\n")
    assert cli("chat", "--session", "a", stdin=b"hello\n", llm=FakeLLM(answer=seeded)).code == 0
    assert records(home, "a")[1]["settings"] == {"temperature": 0.75}
    (home / "config.toml").write_text("temperature = 0.5\n")
    assert cli("chat", "--replay", "a", stdin=b"", llm=FakeLLM(answer=seeded)).code == 0, "the recorded value counts"
    done = cli("chat", "--replay", "a", "-t", "0.125", stdin=b"", llm=FakeLLM(answer=seeded))
    assert done.code == 1
    assert "0 of 1 answers are as they were" in done.err
    assert "it was '75'" in done.err


def test_a_replay_loads_the_model_as_it_was(cli, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    keep = chatting._with_lookup
    monkeypatch.setattr(chatting, "_with_lookup", lambda settings: seen.append(settings.options) or keep(settings))
    monkeypatch.chdir(home)
    (home / "here").mkdir()
    assert cli("chat", "-m", "here", "--session", "a", "--kv-dtype", "fp8", stdin=b"hello\n").code == 0
    (home / "config.toml").write_text('quantize = "w4"\nctx = 77\n')
    monkeypatch.chdir("/")
    assert cli("chat", "--replay", "a", stdin=b"").code == 0
    assert cli("chat", "--replay", "a", "--ctx", "99", stdin=b"").code == 0
    assert [(o.model, o.kv_dtype, o.quantize, o.ctx) for o in seen[1:]] == [
        (str(home / "here"), "fp8", None, None),
        (str(home / "here"), "fp8", None, 99),
    ]


def test_edited_partial_and_older_answers_in_a_replay(cli, home: Path, tmp_path: Path) -> None:
    llm = FakeLLM(answer=seeded)
    assert cli("chat", "--session", "a", stdin=b"one\ntwo\nthree\n", llm=llm).code == 0
    sessions = Sessions(home / "data" / "sessions")
    lines = records(home, "a")
    lines[1] |= {"content": "mine", "edited": True}
    lines[1].pop("model")
    lines[3] |= {"content": lines[3]["content"][:5], "partial": True}  # type: ignore[index]
    older = [{"role": "user", "content": "old"}, {"role": "assistant", "content": "x"}]
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (*lines, *older)))
    done = cli("chat", "--replay", str(path), "--session", "b", stdin=b"", llm=FakeLLM(answer=seeded))
    assert "1 had no recorded settings and seed" in done.err
    again = sessions.open("b").turns
    assert again[1].message.content == "mine"
    assert again[1].edited
    assert again[3].partial
    assert again[3].message.content.startswith(lines[3]["content"])  # type: ignore[arg-type]
    assert again[5].message.content == lines[5]["content"]


def test_a_conversation_that_could_not_be_kept_is_an_error_of_a_pipe(cli, home: Path) -> None:
    (home / "data").mkdir()
    (home / "data" / "sessions").touch()
    done = cli("chat", "--session", "a", stdin=b"hello\n")
    assert done.code == 3
    assert done.err.count("goes on, unsaved") == 1, "not with every message"
    assert done.out == "You said: hello\n"


def test_a_session_is_open_once(cli, home: Path) -> None:
    sessions = Sessions(home / "data" / "sessions")
    sessions.open("a").add(Message("user", "x"))
    with sessions.claim("a"):
        done = cli("chat", "--session", "a", stdin=b"hello\n")
        assert (done.code, done.opened) == (2, False)
        assert "'a' is open in another minicpm chat" in done.err
        done = cli("chat", "--session", "b", stdin=b"hello\n/branch x\n/load a\n")
        assert done.code == 2
    assert cli("chat", "--session", "a", stdin=b"hello\n/branch x\nmore\n").code == 0
    assert sorted(path.name for path in sessions.folder.iterdir()) == ["a+x.jsonl", "a.jsonl", "b+x.jsonl", "b.jsonl"]


def test_the_system_prompt_of_a_session_can_change(cli, home: Path) -> None:
    assert cli("chat", "-s", "brief", "--session", "a", stdin=b"hello\n").code == 0
    assert [line["role"] for line in records(home, "a")] == ["system", "user", "assistant"]
    assert cli("chat", "-s", "other", "-c", stdin=b"more\n").code == 0
    assert records(home, "a")[0]["content"] == "other"
    assert records(home, "a")[2]["system"] == "brief"


def test_an_error_in_a_replay_ends_it(cli) -> None:
    class Failing(FakeLLM):
        def _events(self, request: Request) -> Iterator[Event]:
            raise KeyboardInterrupt

    assert cli("chat", "--session", "a", stdin=b"one\ntwo\n").code == 0
    done = cli("chat", "--replay", "a", stdin=b"", llm=Failing())
    assert done.code == 130
    assert "0 of 0 answers" in done.err
