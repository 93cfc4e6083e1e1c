"""Every error is one message on stderr and the exit code of its class; nothing of it reaches stdout."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fakes import FakeLLM
from minicpm_cli import errors

FAKE = [sys.executable, str(Path(__file__).parents[1] / "fake_cli.py")]
CODES = [
    (errors.UsageError("x"), 2),
    (errors.ContextOverflow(5012, 512, 4096), 2),
    (errors.ModelNotFound("x"), 3),
    (errors.WeightsError("x"), 3),
    (errors.TemplateError("x"), 3),
    (errors.FileError("x"), 3),
    (errors.DeviceError("x"), 4),
    (errors.OutOfMemory("x"), 4),
    (errors.Interrupted("x"), 130),
]


@pytest.mark.parametrize(("error", "code"), CODES, ids=lambda v: type(v).__name__)
def test_exit_code_by_class(cli, error: errors.MinicpmError, code: int) -> None:
    done = cli("run", "hi", llm=FakeLLM(fail=lambda request: error))
    assert (done.code, done.out, done.err) == (code, "", f"minicpm: {error}\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "-t", "nan", "x"], "temperature is nan"),
        (["run", "-t", "-1", "x"], "temperature is -1"),
        (["run", "--top-p", "1.5", "x"], "top_p is 1.5"),
        (["run", "--top-k", "-1", "x"], "top_k is -1"),
        (["run", "--min-p", "2", "x"], "min_p is 2"),
        (["run", "--repetition-penalty", "0", "x"], "repetition_penalty is 0"),
        (["run", "-n", "0", "x"], "max_tokens is 0"),
        (["run", "--seed", "-1", "x"], "seed is -1"),
        (["run", "--ctx", "0", "x"], "ctx is 0"),
        (["run", "--device", "tpu", "x"], "device is 'tpu'"),
        (["run", "-t", "warm", "x"], "'-t'"),
        (["run", "--nope", "x"], "--nope"),
        (["run", "--raw", "-s", "y", "x"], "--raw"),
        (["run", "-x", "--json", "x"], "--extract"),
        (["run", "-m", "a", "--model-path", "b", "x"], "--model names a, --model-path names b"),
        (["bench", "-m", "demo", "--shape", "minicpm-2b"], "--shape measures random weights"),
        (["run"], "no prompt"),
        (["chat", "--overflow", "burst"], "drop-oldest"),
        (["chat", "-c", "--session", "a"], "--session"),
        (["chat", "--session", "../x"], "cannot name a session"),
        (["batch", "-"], "OUT"),
        (["nope"], "nope"),
        (["config", "nope"], "nope"),
    ],
)
def test_usage_errors_come_before_the_model(cli, arguments: list[str], said: str) -> None:
    done = cli(*arguments)
    assert done.code == 2
    assert not done.opened
    assert done.out == ""
    assert said in done.err
    assert done.err.startswith("minicpm: ")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [("-t", "0", "--top-p", "0.9"), ("--top-p", "0"), ("--top-k", "0"), ("--min-p", "1")]
)
def test_odd_but_fine(cli, arguments: tuple[str, ...]) -> None:
    assert cli("run", *arguments, "hi").code == 0


def test_a_switch_that_the_template_does_not_have_is_said(cli) -> None:
    for source, said in (("{{ messages }}", True), ("{% if enable_thinking %}", False), ("", False)):
        done = cli("run", "--think", "hi", llm=FakeLLM(template_source=source))
        assert done.code == 0
        assert ("--think changes nothing: the chat template has no switch" in done.err) is said
    assert cli("run", "--no-think", "hi", llm=FakeLLM(template_source="x")).err == ""


def test_a_defect_is_one_line_and_verbose_shows_where(cli) -> None:
    def broken(request: object) -> str:
        raise KeyError("x")

    done = cli("run", "hi", llm=FakeLLM(answer=broken))
    assert done.code == 3
    assert done.err == "minicpm: internal error: KeyError: 'x' (-v shows where; please report it)\n"
    loud = cli("run", "-v", "hi", llm=FakeLLM(answer=broken))
    assert loud.code == 3
    assert "Traceback" in loud.err
    assert "in broken" in loud.err


def test_a_closed_pipe_ends_it_quietly(home: Path) -> None:
    process = subprocess.Popen([*FAKE, "0.01", "run", "many"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == b"line 1\n"
    begun = time.monotonic()
    process.stdout.close()
    assert process.wait(timeout=10) == -signal.SIGPIPE
    assert time.monotonic() - begun < 1.5, "the generation went on: it takes two seconds"
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_closed_pipe_in_help(home: Path) -> None:
    line = f"{sys.executable} -m minicpm_cli --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, check=False)
    assert done.returncode in (0, 128 + signal.SIGPIPE)
    assert done.stderr == b""


@pytest.mark.parametrize("command", ["run", "chat"])
def test_ctrl_c_is_130_and_keeps_what_came(home: Path, command: str) -> None:
    process = subprocess.Popen(
        [*FAKE, "0.05", command, *(["many"] if command == "run" else [])],
        stdin=subprocess.PIPE if command == "chat" else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    if command == "chat":
        assert process.stdin is not None
        process.stdin.write(b"many\nagain\n")
        process.stdin.flush()
    assert process.stdout is not None
    assert process.stdout.readline() == b"line 1\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert b"again" not in out
