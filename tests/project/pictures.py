"""Draws the README's pictures from the program itself, on the demo model: `python tests/project/pictures.py`.

A shell runs in a pseudo-terminal, what it would show is read off an emulated screen, and rich writes that as SVG.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pexpect
import pyte
from pyte.screens import Char
from rich.console import Console
from rich.style import Style
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / ".pictures"
COLUMNS = 92
SECONDS = 120
WAITS = "\N{ESCAPE}[6n"  # asks where the cursor is, as an input line does that wants to be drawn
QUESTION = "Write a list of three fruits and a python function that adds two numbers."


class Terminal:
    """A shell in a folder of its own, and its screen."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.screen = pyte.Screen(COLUMNS, rows)
        self._stream = pyte.Stream(self.screen)
        env = {name: value for name, value in os.environ.items() if not name.startswith(("MINICPM_", "NO_COLOR"))}
        env |= {"PS1": "$ ", "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        env |= {name: str(folder / name) for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")}
        self._child = pexpect.spawn(
            "bash", ["--norc", "--noprofile"], cwd=folder, env=env, dimensions=(rows, COLUMNS), encoding="utf-8"
        )
        self.until(lambda text: text.endswith("$"))

    def until(self, seen: Callable[[str], bool]) -> None:
        """Reads on until the screen's text is as wanted."""
        end = time.monotonic() + SECONDS
        while not seen(self.text):
            if time.monotonic() > end:
                raise TimeoutError(f"the screen still shows:\n{self.text}")
            self._read()

    def type(self, keys: str) -> None:
        self._child.send(keys)

    def rest(self) -> None:
        """Reads what comes in the next half second."""
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            self._read()

    def close(self) -> None:
        self._child.close(force=True)

    @property
    def text(self) -> str:
        return "\n".join(row.rstrip() for row in self.screen.display).rstrip()

    def svg(self, title: str) -> str:
        console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
        last = max(y for y in range(self.screen.lines) if self.screen.display[y].strip())
        for y in range(last + 1):
            console.print(self._row(y), no_wrap=True, overflow="crop")
        return console.export_svg(title=title, unique_id=title.replace(" ", "-"))

    def _row(self, y: int) -> Text:
        row = Text()
        for x in range(COLUMNS):
            char = self.screen.buffer[y][x]
            row.append(char.data, _style(char))
        row.rstrip()
        return row

    def _read(self) -> None:
        try:
            text = self._child.read_nonblocking(65536, timeout=0.1)
        except pexpect.TIMEOUT:
            return
        self._stream.feed(text)
        if WAITS in text:
            self._child.send(f"\N{ESCAPE}[{self.screen.cursor.y + 1};{self.screen.cursor.x + 1}R")


def _style(char: Char) -> Style:
    return Style(
        color=_color(char.fg), bgcolor=_color(char.bg), bold=char.bold, italic=char.italics,
        underline=char.underscore, reverse=char.reverse,
    )  # fmt: skip


def _color(name: str) -> str | None:
    if name == "default":
        return None
    if len(name) == 6 and set(name) <= set("0123456789abcdef"):
        return f"#{name}"
    return {"brown": "yellow"}.get(name, name.replace("bright", "bright_"))


def chat(folder: Path) -> str:
    terminal = Terminal(folder, 28)
    terminal.type("minicpm chat -m demo --device cpu --temperature 0 --max-tokens 240\r")
    terminal.until(lambda text: "/help lists" in text and "8,192 tokens" in text)
    terminal.rest()
    terminal.type(f"{QUESTION}\r")
    terminal.until(lambda text: "tok/s" in text)
    terminal.rest()
    terminal.type("/stats\r")
    terminal.until(lambda text: "memory:" in text)
    terminal.rest()
    picture = terminal.svg("minicpm chat")
    terminal.close()
    return picture


def batch(folder: Path) -> str:
    lines = [{"id": f"q{n}", "prompt": f"Name one thing that is number {n}."} for n in range(1, 401)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    terminal = Terminal(folder, 30)
    terminal.type("minicpm batch questions.jsonl answers.jsonl -m demo --device cpu --max-tokens 24\r")
    terminal.until(lambda _: _count(folder / "answers.jsonl") > 150)
    terminal.rest()
    terminal.type("\x03")
    terminal.until(lambda text: text.endswith("$"))
    terminal.type("wc -l answers.jsonl\r")
    terminal.until(lambda text: text.endswith("$") and "answers.jsonl\n" in text)
    terminal.type("minicpm batch questions.jsonl answers.jsonl -m demo --device cpu --max-tokens 24\r")
    terminal.until(lambda _: _count(folder / "answers.jsonl") > 300)
    terminal.rest()
    picture = terminal.svg("minicpm batch")
    terminal.close()
    return picture


def _count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for draw in (chat, batch):
        with TemporaryDirectory() as folder:
            (PICTURES / f"{draw.__name__}.svg").write_text(draw(Path(folder)), encoding="utf-8")
            print(f"{draw.__name__}.svg is drawn", file=sys.stderr)


if __name__ == "__main__":
    main()
