"""What a shell is offered, by the scripts that are installed: bash's is run by a bash at a terminal."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from minicpm_cli.bench.command import CHOICES
from minicpm_cli.chat.overflow import OVERFLOWS
from minicpm_cli.cli.assignments import rejoined
from minicpm_cli.cli.options import LOAD, LOGPROBS, LOOKUP, MODEL, OUTPUT, SAMPLING
from minicpm_cli.hub.catalog import CATALOG
from minicpm_cli.quantize.recipe import METHODS
from minicpm_cli.settings_table import ENTRIES

SCRIPTS = {
    "bash": "complete -o default -F _minicpm_completion minicpm",
    "zsh": "compdef _minicpm_completion minicpm",
    "fish": "complete --command minicpm",
}


@pytest.fixture
def offered(cli, monkeypatch):
    """What bash is offered for the last word of a line."""

    def words(line: str) -> list[str]:
        typed = line.split(" ")
        with monkeypatch.context() as patch:
            patch.setenv("_MINICPM_COMPLETE", "complete_bash")
            patch.setenv("COMP_WORDS", "\n".join(typed))
            patch.setenv("COMP_CWORD", str(len(typed) - 1))
            done = cli()
        assert done.err == ""
        return done.out.split()

    return words


def test_commands_and_options(offered) -> None:
    assert {"run", "chat", "batch", "config"} <= set(offered("minicpm "))
    assert offered("minicpm run --tempe") == ["--temperature"]
    assert offered("minicpm config un") == ["unset"]


@pytest.mark.parametrize(
    "command",
    ["run -m", "run --model", "chat -m", "batch -m", "config set model", "pull", "plan", "eval", "eval --against"],
)
def test_aliases_of_models(offered, command: str) -> None:
    assert offered(f"minicpm {command} ") == [entry.alias for entry in CATALOG]
    assert offered(f"minicpm {command} minicpm3") == ["minicpm3-4b", "minicpm3-4b-gptq"]
    assert offered(f"minicpm {command} ./") == []  # so that the shell offers files


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--device", "auto cpu cuda"),
        ("--dtype", "auto bf16 fp16 fp32"),
        ("--quantize", "w4 w8 nf4 int8 fp8 none"),
        ("--kv-dtype", "auto fp8 int8"),
        ("--head-bits", "4 8 16"),
        ("--chat-template", "auto chatml minicpm"),
        ("--gptq-format", "v1 v2 auto"),
        ("--ctx", ""),
    ],
)
def test_what_an_option_may_be(offered, option: str, words: str) -> None:
    assert offered(f"minicpm run {option} ") == words.split()
    name = option.removeprefix("--").replace("-", "_")
    assert offered(f"minicpm config set {name} ") == words.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("quantize a b --method ", METHODS),
        ("chat --overflow ", OVERFLOWS),
        ("bench ", CHOICES),
        ("bench decode ttft1", ("ttft128",)),
        ("bench --shape minicpm4", ("minicpm4-0.5b", "minicpm4-8b")),
    ],
)
def test_words_of_one_command(offered, line: str, words: tuple[str, ...]) -> None:
    assert offered(f"minicpm {line}") == list(words)


def test_every_word_that_is_offered_is_allowed() -> None:
    for entry in ENTRIES.values():
        for choice in entry.choices:
            entry.check(choice)
    options = {parameter.name for group in (MODEL, LOAD, LOOKUP, SAMPLING, LOGPROBS, OUTPUT) for parameter in group}
    assert options >= {name for name, entry in ENTRIES.items() if entry.choices and name not in ("color", "profile")}


def test_sessions(offered, cli) -> None:
    assert offered("minicpm chat --session ") == []
    for name in ("rivers", "rome", "other"):
        assert cli("chat", "--session", name, stdin=b"hello\n").code == 0
    assert offered("minicpm chat --replay ro") == ["rome"]
    assert set(offered("minicpm chat --session r")) == {"rivers", "rome"}


def test_profiles_and_what_can_be_unset(offered, home: Path) -> None:
    (home / "config.toml").write_text("ctx = 1\n[profiles.fast]\nseed = 1\n[profiles.slow]\nctx = 2\n")
    assert offered("minicpm run --profile ") == ["fast", "slow"]
    assert offered("minicpm config unset ") == ["ctx", "seed"]
    (home / "config.toml").write_text("ctx = \n")
    assert offered("minicpm run --profile ") == []


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script_of_a_shell_is_shown(cli, shell: str) -> None:
    done = cli("--show-completion", shell)
    assert (done.code, done.err) == (0, "")
    assert SCRIPTS[shell] in done.out
    if program := shutil.which(shell):
        subprocess.run([program, "-n", "/dev/stdin"], check=True, input=done.out.encode())


def test_a_shell_that_cannot_be_told(cli, monkeypatch) -> None:
    import shellingham

    def fail() -> None:
        raise shellingham.ShellDetectionFailure

    monkeypatch.setattr(shellingham, "detect_shell", fail)
    done = cli("--install-completion")
    assert (done.code, done.out) == (2, "")
    assert "name one: minicpm --install-completion bash|zsh|fish" in done.err
    monkeypatch.setattr(shellingham, "detect_shell", lambda: ("tcsh", "/bin/tcsh"))
    assert "there is no completion for tcsh" in cli("--show-completion").err
    assert cli("--show-completion", "csh").code == 2


def test_a_home_that_cannot_be_written(cli, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "home").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    done = cli("--install-completion", "bash")
    assert done.code == 3
    assert "minicpm --show-completion bash prints it" in done.err


@pytest.fixture
def shell_home(tmp_path: Path, home: Path, monkeypatch) -> Path:
    """A home and a PATH on which `minicpm` is this very package."""
    program = tmp_path / "bin" / "minicpm"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m minicpm_cli "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setenv("PS1", "$ ")
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "notes.txt").touch()
    return tmp_path / "user"


@pytest.fixture
def bash(cli, shell_home: Path) -> Iterator[pexpect.spawn]:
    for _ in range(2):  # a second time changes nothing
        done = cli("--install-completion", "bash")
        assert (done.code, done.out) == (0, "")
    assert (shell_home / ".bashrc").read_text().count("source") == 1
    env = {**os.environ, "TERM": "dumb"}
    child = pexpect.spawn("bash", ["-i"], env=env, cwd=str(shell_home), encoding="utf-8", timeout=20)
    child.sendline("bind 'set enable-bracketed-paste off'; bind 'set bell-style none'; PS1=; echo re''ady")
    child.expect("ready")
    yield child
    child.close(force=True)


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("minicpm qu", "minicpm quantize "),
        ("minicpm run -m minicpm5-2", "minicpm run -m minicpm5-2b "),
        ("minicpm run --tempe", "minicpm run --temperature "),
        ("minicpm run 'a b' --dtype b", "minicpm run 'a b' --dtype bf16 "),
        ("minicpm run --dtype=b", "minicpm run --dtype=bf16 "),
        ("minicpm run --kv-dtype=f", "minicpm run --kv-dtype=fp8 "),
        ("minicpm config set --profile=fast temp", "minicpm config set --profile=fast temperature "),
        ("minicpm run -f no", "minicpm run -f notes.txt "),
    ],
)
def test_bash_completes(bash: pexpect.spawn, typed: str, completed: str) -> None:
    bash.send(typed + "\t")
    bash.expect_exact(completed)


@pytest.mark.parametrize(
    ("words", "at", "joined"),
    [
        (["m", "run", "--dtype", "=", "b"], 4, (["m", "run", "--dtype", "b"], 3)),
        (["m", "run", "--dtype", "="], 3, (["m", "run", "--dtype", ""], 3)),
        (["m", "--a", "=", "1", "--b", "=", "2"], 6, (["m", "--a", "1", "--b", "2"], 4)),
        (["m", "run", "="], 2, (["m", "run", "="], 2)),
    ],
)
def test_an_option_and_its_value_are_two_words(words: list[str], at: int, joined: tuple[list[str], int]) -> None:
    assert rejoined(words, at) == joined


@pytest.fixture
def line_offered(cli, monkeypatch):
    def offered(shell: str, line: str) -> str:
        with monkeypatch.context() as patch:
            patch.setenv("_MINICPM_COMPLETE", f"complete_{shell}")
            patch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
            patch.setenv("_TYPER_COMPLETE_ARGS", line)
            return cli().out

    return offered


def test_values_behind_an_equals_sign(line_offered) -> None:
    assert line_offered("fish", "minicpm run --dtype=").split() == [
        f"--dtype={t}" for t in ("auto", "bf16", "fp16", "fp32")
    ]
    assert line_offered("fish", "minicpm run --kv-dtype=f").split() == ["--kv-dtype=fp8"]
    assert line_offered("fish", "minicpm run --kv-dtype f").split() == ["fp8"]
    assert line_offered("zsh", "minicpm run --kv-dtype=f") == "compset -P '*='; _arguments '*: :((\"fp8\"))'\n"


def test_fish_completes(cli, shell_home: Path) -> None:
    fish = shutil.which("fish")
    if fish is None:
        pytest.skip("there is no fish here")
    script = shell_home / "minicpm.fish"
    script.write_text(cli("--show-completion", "fish").out)
    command = [fish, "-c", f"source {script}; complete -C 'minicpm run -m minicpm3'"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "minicpm3-4b\topenbmb/MiniCPM3-4B"
    command[-1] = command[-1].replace("-m minicpm3", "--dtype=b")
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "--dtype=bf16\n"


def test_completing_is_quick() -> None:
    """It runs at every press of the key: nothing heavy is imported, and nothing of the hub's."""
    command = [sys.executable, "-X", "importtime", "-m", "minicpm_cli"]
    line = {"_MINICPM_COMPLETE": "complete_bash", "COMP_WORDS": "minicpm\nrun\n-m\nminicpm4-0", "COMP_CWORD": "3"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **line})
    assert done.stdout == "minicpm4-0.5b\n"
    heavy = r"\| +(torch|transformers|huggingface_hub|prompt_toolkit|rich|numpy|tokenizers|jinja2)$"
    assert not re.search(heavy, done.stderr, re.MULTILINE)
