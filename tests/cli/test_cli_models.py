"""minicpm models, pull and doctor as commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from checkpoints import write_checkpoint


@pytest.mark.parametrize("fmt", ["safetensors", "bin", "gguf"])
def test_pull_of_a_folder_checks_its_files(cli, tmp_path: Path, fmt: str) -> None:
    path = write_checkpoint(tmp_path / "m", "minicpm-1b", fmt=fmt)
    done = cli("pull", str(path))
    assert (done.code, done.out) == (0, f"{path}\n")
    assert "here and whole" in done.err
    weights = path if path.is_file() else next(p for p in path.iterdir() if p.suffix in (".safetensors", ".bin"))
    weights.write_bytes(weights.read_bytes()[:-1024])
    done = cli("pull", str(path))
    assert (done.code, done.out) == (3, "")
    assert weights.name in done.err


def test_listings_are_a_table_at_a_terminal_and_whole_in_a_narrow_one(
    cli, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = home / ("cache-" + "x" * 60 + "-end")
    monkeypatch.setenv("MINICPM_CACHE_DIR", str(deep))
    monkeypatch.setenv("COLUMNS", "80")
    shown = cli("doctor", tty=True).out
    assert "…" not in shown
    cells = [line[20:] for line in shown.splitlines()]
    assert deep.name in "".join("".join(cells).split())


def test_models_are_whole_at_any_width(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, row in (
        ("160", r" minicpm4-0.5b +openbmb/MiniCPM4-0.5B +0.43B "),
        ("80", r"\nminicpm4-0.5b\n  repository openbmb/MiniCPM4-0.5B, parameters 0.43B, context 32768, size 868.0"),
        ("30", r"\nminicpm4-0.5b\n  repository *\n  openbmb/MiniCPM4-0.5B,"),
    ):
        monkeypatch.setenv("COLUMNS", columns)
        shown = re.sub("\x1b\\[[0-9]*m", "", cli("models", tty=True).out)
        assert re.search(row, shown)
        assert max(map(len, shown.splitlines())) <= int(columns)


@pytest.mark.parametrize("command", ["models", "doctor", "config"])
def test_json_and_lines_have_the_same_rows(cli, command: str) -> None:
    lines = cli(command, "--plain").out.splitlines()
    records = json.loads(cli(command, "--json", "--plain").out)
    names = [r.get("alias", r.get("name")) for r in records] if isinstance(records, list) else list(records)
    assert [line.split("\t")[0] for line in lines[1:]] == names
