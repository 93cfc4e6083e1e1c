"""How much memory a run took at its most: of the GPU by torch's count, of the host by the kernel's."""

from __future__ import annotations

import ctypes
from contextlib import suppress

import torch

_STATUS, _RESET = "/proc/self/status", "/proc/self/clear_refs"


class Meter:
    """Counts from its creation on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with suppress(OSError), open(_RESET, "w", encoding="ascii") as file:
            file.write("5")  # the high-water mark starts anew at what is resident now
        self._before = _resident("VmRSS")

    @property
    def device_bytes(self) -> int | None:
        """The host's on a CPU."""
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else self.host_bytes

    @property
    def host_bytes(self) -> int | None:
        """None where the system does not say."""
        peak = _resident("VmHWM")
        return None if peak is None or self._before is None else max(peak - self._before, 0)


def trim() -> None:
    """Gives freed memory back to the system, where the C library can: the demo keeps 250 MB after its samples."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _resident(key: str) -> int | None:
    with suppress(OSError, ValueError), open(_STATUS, encoding="ascii") as file:
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    return None
