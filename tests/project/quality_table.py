"""Measures the README's quality table: the demo by each recipe, with each cache, and by auto-gptq on the same tokens.

Run by hand, an hour on two quiet cores: `python tests/project/quality_table.py`, then
`python tests/project/readme.py`. Rows are added to .bench/quality.jsonl as they are measured; the last of each counts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402

from demo_folder import demo_folder  # noqa: E402
from minicpm_cli.bench.quality_rows import QualityRow  # noqa: E402
from minicpm_cli.quantize.calibration import Amount, from_file  # noqa: E402
from minicpm_cli.quantize.recipe import Recipe  # noqa: E402
from minicpm_cli.text.tokenizer import load_tokenizer  # noqa: E402
from project.auto_gptq_solver import solve  # noqa: E402
from project.four_texts import four_texts  # noqa: E402
from project.readme import QUALITY  # noqa: E402

AMOUNT = Amount(32, 512)
FOUR, OWN = "32x512 of four texts", "32x512 of its own samples"
W4 = Recipe("gptq", 4, 64)
ASYM = Recipe("gptq", 4, 32, symmetric=False)
W8 = Recipe("gptq", 8, 64)
THEIRS = tuple(replace(recipe, act_order=True, correction=0.0) for recipe in (W4, ASYM, W8))
RECIPES = (
    W4,
    replace(W4, act_order=True),
    replace(W4, correction=0.0),
    ASYM,
    replace(ASYM, act_order=True),
    W8,
    *THEIRS,
    Recipe("rtn", 4, 64),
    Recipe("rtn", 4, 32, symmetric=False),
    Recipe("rtn", 8, 64),
    Recipe("nf4"),
    Recipe("int8"),
    Recipe("fp8"),
)
AUTO_GPTQ = "auto-gptq 0.7.1"


class Table:
    """The demo as a plain folder and the calibration text, both in `work`."""

    def __init__(self, work: Path) -> None:
        self.work, self.plain, self.text = work, work / "demo", work / "four.txt"
        if not self.plain.exists():
            demo_folder(self.plain)
        self.text.write_text(four_texts(load_tokenizer(self.plain)), encoding="utf-8")

    def original(self) -> QualityRow:
        return self._evaluated(self.plain, compared=False)

    def ours(self, recipe: Recipe, calib: str) -> QualityRow:
        out, report = self._empty("out"), self.work / "report.json"
        flags = ["--method", recipe.method, "--bits", recipe.bits, "--group-size", recipe.group, "--no-evaluate"]
        flags += ["--asym"] * (not recipe.symmetric) + ["--act-order" if recipe.act_order else "--no-act-order"]
        flags += ["--correction", recipe.correction, "--calib", calib, "--report", report]
        flags += ["--samples", AMOUNT.samples, "--seqlen", AMOUNT.seqlen]
        minicpm("quantize", self.plain, out, *flags, "--no-resume", "--device", "cpu")
        seconds = json.loads(report.read_text())["seconds"]
        tokens = (OWN if calib == "self" else FOUR) if recipe.calibrates else None
        return self._evaluated(out).quantized(recipe.scheme.name, method_of(recipe), tokens, seconds)

    def theirs(self, recipe: Recipe) -> QualityRow:
        """Measured before packing, so that its files' size is not known."""
        rows = from_file(self.text, AMOUNT, load_tokenizer(self.plain), None)
        out = self._empty("theirs")
        with mock.patch.object(torch.cuda, "synchronize"):  # it calls it on the CPU, too
            kind = {"symmetric": recipe.symmetric, "act_order": recipe.act_order}
            seconds = solve(self.plain, out, rows, recipe.bits, recipe.group, **kind)
        row = self._evaluated(out).quantized(recipe.scheme.name, AUTO_GPTQ, FOUR, seconds)
        return replace(row, bytes=None, bits_per_weight=None)

    def cached(self, kind: str) -> QualityRow:
        """With keys and values in 8 bits."""
        return self._evaluated(self.plain, "--kv-dtype", kind)

    def _evaluated(self, folder: Path, *more: str, compared: bool = True) -> QualityRow:
        against = ["--against", self.plain] if compared else []
        flags = ["--dtype", "fp32", "--device", "cpu", "--json", *more]
        row = QualityRow.from_json(minicpm("eval", folder, *against, *flags))
        return replace(row, setting=replace(row.setting, model="demo"), against="demo" if compared else None)

    def _empty(self, name: str) -> Path:
        shutil.rmtree(self.work / name, ignore_errors=True)
        return self.work / name


def method_of(recipe: Recipe) -> str:
    return f"{recipe.method}, correction {recipe.correction:g}" if recipe.corrects else recipe.method


def minicpm(*arguments: object) -> str:
    """What the command writes to stdout; its stderr is shown."""
    command = [sys.executable, "-m", "minicpm_cli", *map(str, arguments)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT).stdout


def jobs(table: Table) -> dict[str, Callable[[], QualityRow]]:
    """What is measured, by name."""
    found: dict[str, Callable[[], QualityRow]] = {"original": table.original}
    found |= {f"cache: {kind}": partial(table.cached, kind) for kind in ("fp8", "int8")}
    for recipe in RECIPES:
        name = f"{method_of(recipe)}: {recipe.scheme.name}"
        found[name] = lambda recipe=recipe: table.ours(recipe, str(table.text))  # type: ignore[misc]
    found[f"{method_of(W4)}: {W4.scheme.name}, own samples"] = lambda: table.ours(W4, "self")
    for recipe in THEIRS:
        found[f"{AUTO_GPTQ}: {recipe.scheme.name}"] = lambda recipe=recipe: table.theirs(recipe)  # type: ignore[misc]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", metavar="TEXT", help="jobs whose name ends with TEXT; repeatable")
    parser.add_argument("--busy", action="store_true", help="the machine has other work: no times are kept")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="kept, with the demo's plain weights")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as aside:
        work = options.work or Path(aside)
        work.mkdir(parents=True, exist_ok=True)
        for name, measure in jobs(Table(work)).items():
            if not options.only or name.endswith(tuple(options.only)):
                row = measure()
                row = replace(row, quantize_seconds=None) if options.busy else row
                print(f"{name}: perplexity {row.ppl:.3f}, KL {row.kl}, {row.quantize_seconds} s", flush=True)
                with QUALITY.open("a", encoding="utf-8") as file:
                    file.write(row.to_json() + "\n")


if __name__ == "__main__":
    main()
