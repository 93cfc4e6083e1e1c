"""What the README shows of the command line can be typed, and its configuration and templates are read."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main

from fakes import FakeLLM
from minicpm_cli.cli import process as package
from minicpm_cli.cli.template_files import parse
from minicpm_cli.settings import Settings

TEXT = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
TREE = typer.main.get_command(package.app)
FENCED = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
LINES = [
    line for kind, body in FENCED if not kind for line in body.splitlines() if re.match(r".*\bminicpm [a-z]", line)
]
INLINE = re.findall(r"`((?:MINICPM_\w+=\S+ )?minicpm [^`]+)`", TEXT)


def options(command: object) -> set[str]:
    return {word for p in command.params for word in (*p.opts, *p.secondary_opts)}  # type: ignore[attr-defined]


def split(words: list[str]) -> tuple[object, list[str]]:
    """The command that `words` begin with, and what follows."""
    command: object = TREE
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]  # type: ignore[attr-defined]
    return command, words


@pytest.mark.parametrize("line", [*LINES, *INLINE])
def test_every_command_and_flag_exists(line: str) -> None:
    typed = line.partition("minicpm ")[2].partition(" | git")[0]
    words = shlex.split(typed.replace("'{\"name\":'", "x"), comments=True)
    command, rest = split(words)
    assert command is not TREE or words[0].startswith("--"), line
    known = options(command) | options(TREE) | {"--help", "-h"}
    for word in rest:
        if re.match(r"--?[a-zA-Z]", word):
            assert set(word.split("|")[:1]) <= known, (line, word)


def test_flags_named_in_the_text_exist() -> None:
    prose = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
    named = {flag for span in re.findall(r"`([^`\n]+)`", prose) for flag in re.findall(r"(?<!\S)--?[a-z][\w-]*", span)}
    everything: set[str] = options(TREE)
    for command in TREE.commands.values():  # type: ignore[attr-defined]
        everything |= options(command)
        for sub in getattr(command, "commands", {}).values():
            everything |= options(sub)
    assert named - everything - {"--help"} == set()


def blocks(word: str) -> list[str]:
    return [body for kind, body in FENCED if kind == "toml" and word in body]


def test_the_configuration_is_read(tmp_path: Path) -> None:
    (text,) = blocks("[profiles.")
    (tmp_path / "config.toml").write_text(text)
    settings = Settings.load({"profile": "fast"}, {}, tmp_path / "config.toml")
    assert settings.notes == ()
    assert settings.sampling == {"temperature": 0.7, "max_tokens": 200, "think": False}


def test_the_template_is_read() -> None:
    (text,) = blocks("[variables]")
    template = parse("review", Path("review.toml"), text)
    assert template.variables == ("language", "focus", "file")
    assert template.usage == "minicpm run --template review [language=...] [focus=...] file=..."


def test_the_template_of_the_command_line_works(cli, home: Path) -> None:
    create = next(line for line in LINES if line.startswith("minicpm templates create"))
    run = next(line for line in LINES if line.startswith("minicpm run --template review file="))
    (home / "main.py").write_text("x = 1\n")
    assert cli(*shlex.split(create, comments=True)[1:]).code == 0
    llm = FakeLLM()
    words = [word.replace("main.py", str(home / "main.py")) for word in shlex.split(run, comments=True)[1:]]
    assert cli(*words, llm=llm).code == 0
    assert llm.seen[0].messages[-1].content == "Look for bugs in this: main.py:\n```\nx = 1\n```"  # type: ignore[union-attr]
