"""Measures the README's speed tables, job by job: each is one `minicpm bench` and takes less than five minutes.

Run by hand on a quiet machine with a GPU: `python tests/project/speed_table.py`, then `python tests/project/readme.py`.
Rows are added to .bench/rows.jsonl as they are measured; the last of each counts.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from project.readme import ROWS  # noqa: E402

W4 = "--quantize w4 --head-bits 8"
JOBS = {
    "2b": "--shape minicpm-2b",
    "2b w4": f"--shape minicpm-2b {W4}",
    "2b throughput": "--shape minicpm-2b throughput",
    "2b throughput fp8": "--shape minicpm-2b throughput --kv-dtype fp8",
    "2b throughput w4 fp8": f"--shape minicpm-2b throughput --kv-dtype fp8 {W4}",
    "2b one": "--shape minicpm-2b throughput --gpus 1",
    "2b two": "--shape minicpm-2b throughput --gpus 2",
    "2b load": "--shape minicpm-2b load",
    "2b load w4": f"--shape minicpm-2b load {W4}",
    "2b kernels": "--shape minicpm-2b kernels",
    "2b w4 w4": "--shape minicpm-2b --quantize w4 --head-bits 4",
    "2b fp8": "--shape minicpm-2b decode-long batch64 --kv-dtype fp8",
    "2b int8": "--shape minicpm-2b decode-long batch64 --kv-dtype int8",
    "2b eager": "--shape minicpm-2b decode batch64 --no-graphs",
    "2b nf4": "--shape minicpm-2b decode batch64 --quantize nf4",
    "2b llm.int8": "--shape minicpm-2b decode batch64 --quantize int8",
    "8b": "--shape minicpm4-8b",
    "8b w4": f"--shape minicpm4-8b {W4}",
    "0.5b": "--shape minicpm4-0.5b",
    "1b": "--shape minicpm5-1b",
    "mla": "--shape minicpm3-4b",
    "moe": "--shape minicpm-moe-8x2b",
    "peer": "--shape minicpm-2b decode ttft128 ttft2048 batch64 --against transformers",
}


def run(arguments: str, rows: Path) -> float:
    """The seconds that it took. What was measured stays, even where the rest fails."""
    begun = time.monotonic()
    command = [sys.executable, "-m", "minicpm_cli", "bench", "--json", *arguments.split()]
    with rows.open("ab") as file:
        subprocess.run(command, stdout=file, check=True, cwd=ROOT)
    return time.monotonic() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"none: all; of {', '.join(JOBS)}")
    parser.add_argument("--rows", type=Path, default=ROWS, metavar="FILE", help="to which they are added")
    options = parser.parse_args()
    if unknown := set(options.jobs) - set(JOBS):
        parser.error(f"no job is called {', '.join(sorted(unknown))}")
    failed = []
    for name in options.jobs or JOBS:
        try:
            print(f"{name}: {run(JOBS[name], options.rows):.0f} s", flush=True)
        except subprocess.CalledProcessError as error:
            failed.append(name)
            print(f"{name}: failed ({error.returncode})", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
