"""Attention compiled for GPUs other than the one that it was tuned on: what a block takes is what their blocks have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="it compiles for any GPU")
KERNELS = ("grouped:128:fp32", "prefill:288:bf16")  # those that take most
LEAST = 99 << 10  # of a block, with compute capability 8.6, 8.9 and 12.0


def test_attention_fits_the_blocks_of_consumer_gpus(tmp_path: Path) -> None:
    compiler = Path(__file__).with_name("compiled_memory.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(compiler), "86", *KERNELS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    taken = dict(zip(KERNELS, map(int, done.stdout.split()), strict=True))
    assert not {kernel: size for kernel, size in taken.items() if size > LEAST}
