"""The README's table of what others read of ours and we of theirs, from a record of tests/interop/by_hand.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OURS, THEIRS = "written by us, read by", "read by us, written by"


def interop_table(record: Path) -> str:
    found: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    readers = sorted({reader for row in found[OURS].values() for reader in row})
    lines = [
        f"| written here | read by {' | read by '.join(readers)} |",
        "| :-- |" + " --: |" * len(readers),
        *(f"| {name} | {' | '.join(_cell(row.get(r)) for r in readers)} |" for name, row in found[OURS].items()),
        "",
        "| written there | by | read here |",
        "| :-- | :-- | --: |",
        *(f"| {name} | {by} | {_cell(one)} |" for by, rows in found[THEIRS].items() for name, one in rows.items()),
    ]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return "\n".join([*lines, "", f"On {found['date']} with {versions}, Python {found['python']}, on a CPU."])


def _cell(difference: dict[str, float] | None) -> str:
    return "it cannot" if difference is None else f"{difference['relative']:.1e}"
