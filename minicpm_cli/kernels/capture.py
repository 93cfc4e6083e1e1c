"""The capture of a CUDA graph, undisturbed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def captured(graph: torch.cuda.CUDAGraph, pool: Any = None, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """What this thread launches becomes `graph`'s.

    Python's collector waits: if it met another graph in what an earlier engine left, that graph's end would break this
    one (cudaErrorStreamCaptureInvalidated, torch 2.11 on an H200). Other threads may use the device meanwhile.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    finally:
        if collecting:
            gc.enable()
