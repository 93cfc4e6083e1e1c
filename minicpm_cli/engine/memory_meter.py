"""Measures what each phase of a run takes at its most, to be held against the plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from minicpm_cli.engine.memory_ledger import Phase

MOST_CHANGES = 64  # of phase: reading the allocator's statistics takes 0.1 ms, which a long run need not pay for ever
_STATUS, _RESET = "/proc/self/status", "/proc/self/clear_refs"


class MemoryMeter:
    """Peaks by phase since its creation: of torch's allocator on a GPU, of the process's memory on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._phase: Phase | None = None
        self._left = MOST_CHANGES
        self._base = {key: _resident(key) for key in ("VmRSS", "RssAnon")}
        self.peaks: dict[Phase, tuple[int, int]] = {}  # allocated and reserved

    def enter(self, phase: Phase) -> None:
        """From here on it is `phase`. Cheap to call at every step; after many changes nothing is measured any more."""
        if phase == self._phase or not self._left:
            return
        self._left -= 1
        self._switch(phase if self._left else None)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """The block is `phase`; afterwards it is what it was before."""
        before = self._phase
        self._switch(phase)
        try:
            yield
        finally:
            self._switch(before)

    def settle(self) -> None:
        """Counts what the present phase has taken so far."""
        if self._phase is not None:
            found, before = self._now(self._phase), self.peaks.get(self._phase, (0, 0))
            self.peaks[self._phase] = (max(found[0], before[0]), max(found[1], before[1]))

    def _switch(self, phase: Phase | None) -> None:
        self.settle()
        self._phase = phase
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
        else:
            with suppress(OSError), open(_RESET, "w", encoding="ascii") as file:
                file.write("5")  # the high-water mark starts anew

    def _now(self, phase: Phase) -> tuple[int, int]:
        if self._cuda is not None:
            stats = torch.cuda.memory_stats(self._cuda)
            return int(stats.get("allocated_bytes.all.peak", 0)), int(stats.get("reserved_bytes.all.peak", 0))
        # Files are mapped while they are loaded, which is no memory of ours.
        own = (
            _resident("RssAnon") - self._base["RssAnon"]
            if phase == "load"
            else _resident("VmHWM") - self._base["VmRSS"]
        )
        return max(own, 0), _resident("VmHWM")


def _resident(key: str) -> int:
    """Bytes of this process; 0 where the system does not say."""
    with suppress(OSError, ValueError), open(_STATUS, encoding="ascii") as file:
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    return 0
