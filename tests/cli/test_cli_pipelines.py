"""minicpm run between other programs: real pipes, closed streams, full disks, and the exit codes that scripts read."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fakes import FakeLLM
from minicpm_cli import errors
from minicpm_cli.chat.terminal import Terminal
from minicpm_cli.cli import reading
from minicpm_cli.cli.options import EXIT_CODES
from minicpm_cli.types import Message, Request

FAKE = [sys.executable, str(Path(__file__).parents[1] / "fake_cli.py"), "0"]
REAL = [sys.executable, "-m", "minicpm_cli"]
BAD_ROW = b'{"prompt": "a"}\n{bad\n'


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """A line of bash, in which $minicpm is the program with a fake model, $slow one that takes a minute to answer."""
    slow = [*FAKE[:-1], "0.5"]
    env = {**os.environ, "minicpm": " ".join(FAKE), "slow": " ".join(slow)}
    done = subprocess.run(["bash", "-c", line], env=env, capture_output=True, text=True, check=False, timeout=60)
    assert "Traceback" not in done.stderr
    return done


def asked(llm: FakeLLM) -> str:
    messages = llm.seen[-1].messages
    assert isinstance(messages, tuple)
    return messages[-1].content


@pytest.mark.parametrize(
    ("command", "stdin", "code"),
    [
        ([*FAKE, "run", "hi"], b"", 0),
        ([*FAKE, "run", "-x", "hi"], b"", 1),
        ([*FAKE, "batch", "-", "-"], BAD_ROW, 1),
        ([*REAL, "run", "-t", "nan", "hi"], b"", 2),
        ([*REAL, "run", "--nope"], b"", 2),
        ([*FAKE, "run"], b"\xff", 2),
        ([*REAL, "run", "-m", "./no/such/model", "hi"], b"", 3),
        ([*FAKE, "run", "-f", "/no/such/file"], b"", 3),
        ([*REAL, "plan", "-m", "DEMO", "--free", "1MB"], b"", 4),
    ],
    ids=lambda value: " ".join(value[3:5]) if isinstance(value, list) else "",
)
def test_exit_codes_of_real_processes(home: Path, demo_gguf: Path, command: list[str], stdin: bytes, code: int) -> None:
    command = [str(demo_gguf) if word == "DEMO" else word for word in command]
    done = subprocess.run(command, input=stdin, capture_output=True, check=False, timeout=60)
    assert (done.returncode, b"Traceback" in done.stderr) == (code, False)
    assert code in EXIT_CODES


def test_interrupted_is_130(home: Path) -> None:
    process = subprocess.Popen(
        [*FAKE[:-1], "0.2", "run", "many"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == b"minicpm: interrupted\n"


STARTED = """
import os, signal, sys
from minicpm_cli.cli import main
class Finder:
    def find_spec(name, path, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
main(sys.argv[2:])
"""


@pytest.mark.parametrize("module", ["minicpm_cli.settings", "typer", "minicpm_cli.cli.program", "torch"])
def test_interrupted_while_it_starts(home: Path, demo_gguf: Path, module: str) -> None:
    """Whatever is read just then: one line, and no traceback."""
    command = ["run", "-m", str(demo_gguf), "--device", "cpu", "-n", "1", "Count."]
    done = subprocess.run(
        [sys.executable, "-c", STARTED, module, *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=30,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"minicpm: interrupted\n")


def test_a_prompt_that_begins_with_a_dash(cli) -> None:
    result = cli("run", "-5 degrees, is that cold?")
    assert (result.code, result.opened) == (2, False)
    assert "a prompt that begins with - needs -- before it" in result.err
    assert "-5 degrees" in cli("run", "--", "-5 degrees, is that cold?").out
    assert "needs --" not in cli("run", "--topp", "0.5", "Hi").err, "there the option was meant"


@pytest.mark.parametrize("text", ["GIF89a or PNG?", "GGUF, what is that?", "%PDF- begins which files?"])
def test_questions_about_files_are_no_files(cli, text: str) -> None:
    assert text in cli("run", stdin=text.encode()).out


def test_an_argument_that_is_no_utf_8(cli) -> None:
    word = os.fsdecode(b"caf\xe9")
    result = cli("run", word)
    assert (result.code, result.opened) == (2, False)
    assert "the prompt is not UTF-8: byte 0xe9 at offset 3" in result.err
    assert "café" in cli("run", "--encoding", "latin-1", word).out


@pytest.mark.parametrize("closed", ["2>/dev/full", "2>&-"])
def test_an_error_that_cannot_be_said_has_its_exit_code(home: Path, closed: str) -> None:
    assert shell(f"$minicpm run --top-p 7 hi {closed}").returncode == 2


def test_chat_without_a_stdin(home: Path) -> None:
    done = shell("$minicpm chat <&-")
    assert (done.returncode, done.stderr) == (2, "minicpm: there is no stdin to read: it is closed\n")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("run --template ~nobody7/x.toml a", 3),
        ("run --chat-template ~nobody7/x a", 2),
        ("chat --replay ~nobody7/x", 2),
        ("config set --quiet data_dir ~nobody7/x", 0),
        ("config set --quiet model ~nobody7/x", 0),
        ("plan -m ~nobody7/x", 3),
    ],
)
def test_the_home_of_nobody(cli, arguments: str, code: int) -> None:
    done = cli(*arguments.split())
    assert "internal error" not in done.err
    assert (done.code, done.opened) == (code, False)


def test_the_table_in_the_help_holds_every_code(cli) -> None:
    def codes(cls: type[errors.MinicpmError]) -> set[int]:
        return {cls.exit_code}.union(*map(codes, cls.__subclasses__()))

    assert set(EXIT_CODES) == {0, 1} | codes(errors.MinicpmError)
    for code, meaning in EXIT_CODES.items():
        assert f"\n    {code:<4} {meaning}\n" in cli("--help").out + "\n"


@pytest.mark.parametrize("arguments", ["--json many", "-x many"])
def test_a_reader_that_left_ends_it_quietly_and_soon(home: Path, arguments: str) -> None:
    """Also where nothing would be written for another minute."""
    begun = time.monotonic()
    done = shell(f"$slow run {arguments} | true; echo ${{PIPESTATUS[0]}}")
    assert done.stdout == f"{128 + signal.SIGPIPE}\n"
    assert done.stderr == ""
    assert time.monotonic() - begun < 20


def test_head_gets_its_line(home: Path) -> None:
    done = shell("$minicpm run many | head -1; echo ${PIPESTATUS[*]}")
    assert done.stdout.splitlines() == ["line 1", f"{128 + signal.SIGPIPE} 0"]
    assert done.stderr == ""


def test_stdin_that_is_empty_or_closed(cli, home: Path) -> None:
    assert cli("run", "hi", stdin=b"").err == ""  # as < /dev/null
    nothing = cli("run", stdin=b"")
    assert (nothing.code, nothing.out) == (2, "")
    assert "stdin is empty, and there is no prompt" in nothing.err
    empty = shell(": | $minicpm run hi")
    assert (empty.stdout, empty.stderr) == (
        "You said: hi\n",
        "minicpm: stdin is empty, so the prompt is asked without it\n",
    )
    closed = shell("$minicpm run hi <&- && $minicpm run -f - <&-")
    assert closed.stdout == "You said: hi\n"
    assert "it is closed" in closed.stderr


def test_a_pipe_that_gives_nothing_is_named(monkeypatch) -> None:
    monkeypatch.setattr(reading, "_PATIENCE", 0.05)
    reader, writer = os.pipe()
    err = io.StringIO()
    late = threading.Timer(0.3, lambda: (os.write(writer, b"late\n"), os.close(writer)))
    late.start()
    with open(reader, "rb") as pipe:
        assert reading.Source(Terminal(io.StringIO(), err), pipe).question([], []) == "late"
    late.join()
    assert err.getvalue() == "minicpm: waiting for stdin (< /dev/null where there is nothing to read)\n"


@pytest.mark.parametrize("command", ["run hi", "config"])
def test_a_full_disk(home: Path, command: str) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full here")
    done = shell(f"$minicpm {command} > /dev/full")
    assert (done.returncode, done.stderr) == (3, "minicpm: cannot write the output: No space left on device\n")


def test_streams_that_are_closed(home: Path) -> None:
    assert shell("$minicpm run hi >&-").returncode == 0
    done = shell("$minicpm run hi 2>&-")
    assert (done.returncode, done.stdout) == (0, "You said: hi\n")


@pytest.mark.parametrize(
    ("data", "encoding", "text"),
    [
        ("café".encode("latin-1"), "latin-1", "café"),
        ("中文".encode("gb18030"), "GB18030", "中文"),
        ("hi\n".encode("utf-16"), "utf-16", "hi"),
        (b"\xef\xbb\xbfhi", "utf8", "hi"),
        (b"\xef\xbb\xbfhi", "utf-8-sig", "hi"),
    ],
)
def test_other_encodings(cli, tmp_path: Path, data: bytes, encoding: str, text: str) -> None:
    llm = FakeLLM()
    assert cli("run", "--encoding", encoding, stdin=data, llm=llm).code == 0
    assert asked(llm) == text
    (tmp_path / "a.txt").write_bytes(data)
    cli("run", "--encoding", encoding, "-f", str(tmp_path / "a.txt"), llm=llm)
    assert asked(llm) == f"a.txt:\n```\n{text}\n```"


@pytest.mark.parametrize(
    ("data", "arguments", "said"),
    [
        (b"caf\xe9", [], "stdin is not UTF-8: byte 0xe9 at offset 3. Name its --encoding (utf-16, latin-1,"),
        (b"\xef\xbb\xbfab\xff", [], "byte 0xff at offset 5"),
        (
            b"caf\xe9",
            ["--encoding", "ascii"],
            "stdin is not ASCII: byte 0xe9 at offset 3. Is it in another",
        ),
        ("hi".encode("utf-16"), [], "stdin is UTF-16 text. Name its --encoding"),
        (b"a\0b", [], "stdin is a binary file"),
        (b"abc", ["--encoding", "utf-16"], "stdin is not UTF-16: byte 0x63 at offset 2"),
    ],
)
def test_bytes_that_are_no_text(cli, data: bytes, arguments: list[str], said: str) -> None:
    done = cli("run", *arguments, stdin=data)
    assert (done.code, done.opened, done.out) == (2, False, "")
    assert said in done.err


@pytest.mark.parametrize("name", ["klingon", "base64", "rot13", "idna", "unicode_escape", "undefined", "", "a\0b"])
def test_names_of_no_encoding(cli, name: str) -> None:
    done = cli("run", "--encoding", name, "hi")
    assert (done.code, done.opened) == (2, False)
    assert f"--encoding is {name!r}; it must be an encoding of text" in done.err


def test_files_of_one_name_are_told_apart(cli, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "main.py").write_text(folder)
    llm = FakeLLM()
    cli("run", "-f", "a/main.py", "-f", "b/main.py", "-f", "-", "Compare", stdin=b"c\n", llm=llm)
    parts = [f"{name}:\n```\n{text}\n```" for name, text in (("a/main.py", "a"), ("b/main.py", "b"), ("stdin", "c"))]
    assert asked(llm) == "\n\n".join([*parts, "Compare"])


def test_files_that_a_shell_spelled_out_are_pointed_at(cli, tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("x")
    done = cli("run", "-f", str(tmp_path / "a.py"), str(tmp_path / "b.py"), "Check")
    assert done.err == f"minicpm: {tmp_path / 'b.py'} is taken for words of the prompt; each file needs its own -f\n"


def test_a_model_that_stands_where_the_prompt_does(cli) -> None:
    said = "minicpm: minicpm4-8b is taken for a word of the prompt; -m minicpm4-8b chooses the model\n"
    assert cli("run", "minicpm4-8b", "hi").err == said
    assert cli("run", "Is minicpm4-8b good?").err == ""


def test_a_dash_is_stdin_also_at_a_terminal(cli) -> None:
    llm = FakeLLM()
    cli("run", "-", stdin=b"piped\n", llm=llm)
    assert asked(llm) == "piped"


def test_an_answer_that_cannot_be_kept_is_an_answer(cli, home: Path) -> None:
    (home / "data").write_text("a file where a folder should be")
    done = cli("run", "hi")
    assert (done.code, done.out) == (0, "You said: hi\n")
    assert "cannot be continued" in done.err


def test_what_is_continued_is_what_was_begun(cli, home: Path) -> None:
    """Another session that is written to meanwhile stays what it is, and so does what is added to this one."""
    sessions = home / "data" / "sessions"
    cli("run", "-s", "Be brief", "one")
    other = sessions / "other.jsonl"

    def meanwhile(request: Request) -> str:
        other.write_text('{"role": "user", "content": "mine"}\n')
        with (sessions / "run.jsonl").open("a") as file:
            file.write('{"role": "user", "content": "added"}\n')
        return "two"

    cli("run", "-c", "and?", llm=FakeLLM(answer=meanwhile))
    assert other.read_text() == '{"role": "user", "content": "mine"}\n'
    kept = [json.loads(line)["content"] for line in (sessions / "run.jsonl").read_text().splitlines()]
    assert kept == ["Be brief", "one", "You said: one", "added", "and?", "two"]


def test_another_system_prompt_takes_the_place_of_the_first(cli) -> None:
    llm = FakeLLM()
    cli("run", "-s", "Be brief", "one", llm=llm)
    cli("run", "-c", "-s", "Be long", "two", llm=llm)
    cli("run", "-c", "three", llm=llm)
    messages = llm.seen[-1].messages
    assert isinstance(messages, tuple)
    assert messages[0] == Message("system", "Be long")
    assert [m.content for m in messages[1:]] == ["one", "You said: one", "two", "You said: two", "three"]


def test_a_session_keeps_how_the_answer_was_made(cli, home: Path) -> None:
    cli("run", "-t", "0.5", "--seed", "7", "--prefill", "A", "one")
    line = json.loads((home / "data" / "sessions" / "run.jsonl").read_text().splitlines()[-1])
    assert (line["model"], line["settings"], line["seed"], line["given"]) == ("fake", {"temperature": 0.5}, 7, 1)


def test_a_session_of_an_older_version_goes_on(cli, home: Path) -> None:
    (home / "data" / "sessions").mkdir(parents=True)
    old = '{"role": "user", "content": "one"}\n{"role": "assistant", "content": "1", "time": 5}\n'
    (home / "data" / "sessions" / "run.jsonl").write_text(old)
    llm = FakeLLM()
    assert cli("run", "-c", "two", llm=llm).code == 0
    assert [m.content for m in llm.seen[-1].messages] == ["one", "1", "two"]  # type: ignore[union-attr]


def test_logprobs_need_the_record(cli, home: Path) -> None:
    done = cli("run", "--logprobs", "2", "hi")
    assert (done.code, "add --json" in done.err) == (2, True)
    (home / "config.toml").write_text("logprobs = 2\n")
    assert cli("run", "hi").code == 0


def test_everything_of_a_record_is_there(home: Path) -> None:
    record = json.loads(shell("echo x | $minicpm run --json --prefill Hi hi").stdout)
    assert re.fullmatch(r"run-[0-9a-f]{12}", record["id"])
    assert record["text"] == "HiYou said: hi\n\nx"
    assert set(record["usage"]) == {"prompt_tokens", "completion_tokens", "cached_tokens"}
    assert set(record["timings"]) == {
        "load_seconds",
        "first_token_seconds",
        "prefill_tokens_per_second",
        "decode_tokens_per_second",
    }
    assert isinstance(record["seed"], int)
