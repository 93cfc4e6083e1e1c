"""How the program starts: fast, without the heavy libraries, with help that can be run."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import typer.main

from minicpm_cli.cli import process as package

HEAVY = ("torch", "transformers", "huggingface_hub", "prompt_toolkit", "rich", "numpy", "tokenizers", "jinja2")
TREE = typer.main.get_command(package.app).commands  # type: ignore[attr-defined]
COMMANDS = sorted(TREE)
PATHS = [(name,) for name in COMMANDS] + [
    (name, sub) for name in COMMANDS for sub in getattr(TREE[name], "commands", ())
]


def test_help_is_fast_and_imports_nothing_heavy() -> None:
    """In seconds of the processor: a wall clock would also measure the tests that run beside this one."""
    command = [sys.executable, "-X", "importtime", "-m", "minicpm_cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert not imported & set(HEAVY)
    seconds = []
    for _ in range(5):
        before = os.times()
        subprocess.run([sys.executable, "-m", "minicpm_cli", "--help"], capture_output=True, check=True)
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(seconds) < 0.3


def test_a_usage_error_imports_nothing_heavy_either() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "minicpm_cli", "run", "-t", "nan", "hi"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert not re.search(rf"\| +({'|'.join(HEAVY)})$", done.stderr, re.MULTILINE)


def test_version(cli) -> None:
    assert re.fullmatch(r"minicpm \S+( installed\))?\n", cli("--version").out)


def test_help_names_commands_and_exit_codes(cli) -> None:
    done = cli("--help")
    assert done.code == 0
    for command in COMMANDS:
        assert re.search(rf"^  {command} ", done.out, re.MULTILINE)
    for code in (0, 1, 2, 3, 4, 130):
        assert re.search(rf"^    {code} ", done.out, re.MULTILINE)
    assert cli().out == done.out


@pytest.mark.parametrize("command", PATHS, ids=" ".join)
def test_every_command_has_the_common_flags(cli, command: tuple[str, ...]) -> None:
    done = cli(*command, "--help")
    assert done.code == 0
    assert "-q, --quiet" in done.out
    assert "-v, --verbose" in done.out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples(cli, command: str) -> None:
    assert f"minicpm {command}" in cli(command, "--help").out.partition("Examples:")[2]


@pytest.mark.parametrize("command", PATHS, ids=" ".join)
def test_the_flags_in_examples_exist(cli, command: tuple[str, ...]) -> None:
    for line in cli(*command, "--help").out.partition("Examples:")[2].splitlines():
        mine = re.sub(r""""[^"]*"|'[^']*'""", "", line.partition("minicpm ")[2].partition("|")[0])
        shown = max((path for path in PATHS if tuple(mine.split()[: len(path)]) == path), key=len, default=command)
        options = cli(*shown, "--help").out.partition("Examples:")[0]
        for flag in re.findall(r"(?<= )(--?[a-z][a-z-]*)(?= |$)", mine):
            assert re.search(rf"(^| |/){re.escape(flag)}\b", options), flag


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["chta"], "No such command 'chta'. Did you mean 'chat'? See: minicpm --help"),
        (
            ["How many days?"],
            "No such command 'How many days?' (minicpm run \"PROMPT\" asks a model). See: minicpm --help",
        ),
        (["-m", "demo", "run"], "No such option: -m before a command: options stand behind it. See: minicpm --help"),
        (["run", "--temprature", "1"], " --temperature, "),
        (["list"], "No such command 'list' (minicpm models lists them). See: minicpm --help"),
        (["generate"], "No such command 'generate' (minicpm run \"PROMPT\" asks a model). See: minicpm --help"),
    ],
)
def test_what_was_perhaps_meant(cli, arguments: list[str], said: str) -> None:
    done = cli(*arguments)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
