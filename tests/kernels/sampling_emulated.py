"""The CUDA kernel of `sampling`, its own text compiled for the CPU and run thread by thread."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minicpm_cli.kernels import sampling_cuda
from minicpm_cli.kernels.sampling import DrawState, PenaltyState

EMULATOR = Path(__file__).with_name("sampling_emulator.cpp")


@functools.cache
def library(threads: int, listed: int) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile the emulated kernel")
    with tempfile.TemporaryDirectory() as folder:
        to, source = Path(folder) / "kernel.so", Path(folder) / "kernel.cu"
        source.write_text(sampling_cuda.source())
        options = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w", f'-DKERNEL="{source}"']
        options += sampling_cuda.options(threads, listed)
        subprocess.run([compiler, *options, "-o", str(to), str(EMULATOR)], check=True)
        return ctypes.CDLL(str(to))


@dataclass
class Emulated:
    """Draws as the kernel does with so many threads in a block, so many blocks of a row and such lists.

    Twice where nothing is counted: the order in which the threads run must not matter.
    """

    threads: int = 64
    listed: int = 100
    blocks: int = 2

    def __call__(
        self,
        logits: Tensor,
        state: DrawState | None,
        penalties: PenaltyState | None,
        allowed: Tensor | None,
        ids: Tensor,
        peaks: Tensor,
    ) -> None:
        self._run(logits, state, penalties, allowed, ids, peaks, backwards=True)
        if penalties is not None:
            return
        again = torch.empty_like(ids)
        self._run(logits, state, penalties, allowed, again, peaks, backwards=False)
        assert torch.equal(ids, again)

    def _run(
        self,
        logits: Tensor,
        state: DrawState | None,
        penalties: PenaltyState | None,
        allowed: Tensor | None,
        ids: Tensor,
        peaks: Tensor,
        *,
        backwards: bool,
    ) -> None:
        p = sampling_cuda.Parameters()
        sampling_cuda.set_call(p, logits, state, penalties, allowed, ids, peaks)
        assert library(self.threads, self.listed).emulate(ctypes.byref(p), len(logits), self.blocks, backwards)
