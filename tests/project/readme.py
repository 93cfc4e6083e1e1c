"""Writes the README's generated blocks: `python tests/project/readme.py`. test_readme checks that it was run."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from project.interop_table import interop_table  # noqa: E402

if TYPE_CHECKING:
    from minicpm_cli.bench.rows import Row

README = ROOT / "README.md"
ROWS = ROOT / ".bench" / "rows.jsonl"
QUALITY = ROOT / ".bench" / "quality.jsonl"
INTEROP = ROOT / ".bench" / "interop.json"


def blocks() -> dict[str, str]:
    """What belongs between `<!-- name... -->` and `<!-- /name -->`."""
    return {
        "commands": commands(),
        "benchmarks": benchmarks(),
        "kernels": kernels(),
        "quality": quality(),
        "interop": interop(),
    }


def commands() -> str:
    """A table of the application's visible commands, in its own words."""
    import typer.main

    from minicpm_cli.cli.program import program

    group = typer.main.get_command(program())
    listed = group.commands.items()  # type: ignore[attr-defined]
    lines = [f"| `minicpm {name}` | {first_line(command.help)} |" for name, command in listed if not command.hidden]
    return "\n".join(["| command | what it does |", "| :-- | :-- |", *lines])


def first_line(help_text: str | None) -> str:
    return (help_text or "").strip().split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def benchmarks() -> str:
    """The tables of the stored rows."""
    from minicpm_cli.bench.command import COLUMNS
    from minicpm_cli.bench.rows import markdown_table

    return markdown_table(speed_rows(), COLUMNS) or "No rows yet."


def kernels() -> str:
    """The stored rows of single operations."""
    from minicpm_cli.bench.rows import kernel_table

    return kernel_table(speed_rows()) or "No rows yet."


def speed_rows() -> list[Row]:
    from minicpm_cli.bench.rows import read_rows

    return read_rows(ROWS.read_text(encoding="utf-8")) if ROWS.is_file() else []


def quality() -> str:
    """The table of the stored quality rows."""
    from minicpm_cli.bench.quality_rows import quality_table, read_quality

    rows = read_quality(QUALITY.read_text(encoding="utf-8")) if QUALITY.is_file() else []
    return quality_table(rows) if rows else "No rows yet."


def interop() -> str:
    return interop_table(INTEROP)


def filled(text: str, content: dict[str, str]) -> str:
    """`text` with each block's content in place."""
    for name, inside in content.items():
        marks = re.compile(rf"(<!-- {name}\b.*?-->\n).*?(<!-- /{name} -->)", re.DOTALL)
        assert len(marks.findall(text)) == 1, f"README.md needs the block {name} once"
        text = marks.sub(lambda found, inside=inside: f"{found[1]}\n{inside}\n\n{found[2]}", text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    README.write_text(filled(README.read_text(encoding="utf-8"), blocks()), encoding="utf-8")
