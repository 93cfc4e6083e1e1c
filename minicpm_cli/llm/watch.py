"""A run's memory: measured by phase, written beside what was planned for it, and asked what would fit at its end."""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from minicpm_cli.engine.memory import MemoryPlan, what_would_fit
from minicpm_cli.engine.memory_ledger import Kind, Measured, Phase, record
from minicpm_cli.engine.memory_meter import MemoryMeter
from minicpm_cli.llm.device import free_bytes
from minicpm_cli.model.config import ModelConfig

LIBRARIES = ("torch", "triton", "minicpm-cli")


class Watch:
    """See `minicpm_cli.engine.engine.Memory`. `ledger` is the folder of the ledger; None keeps none."""

    def __init__(
        self, plan: MemoryPlan, cfg: ModelConfig, kind: Kind, device: torch.device, ledger: Path | None
    ) -> None:
        self._plan, self._cfg, self._kind, self._device, self._ledger = plan, cfg, kind, device, ledger
        self._meter = MemoryMeter(device)

    def during(self, phase: Phase) -> AbstractContextManager[None]:
        return self._meter.during(phase)

    def enter(self, phase: Phase) -> None:
        self._meter.enter(phase)

    def advice(self, tokens: int, seqs: int) -> str:
        """What would have fitted instead of a step of so many tokens for so many sequences."""
        free = free_bytes(self._device)
        if self._device.type == "cuda":
            free += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return what_would_fit(self._cfg, tokens, seqs, free, self._plan.form)

    def measured(self) -> list[Measured]:
        """What each phase took so far."""
        self._meter.settle()
        plan, peaks = self._plan, self._plan.peaks
        return [
            Measured(
                self._kind, phase, peaks[phase], taken, reserved, plan.context, plan.max_seqs, plan.max_batch_tokens
            )
            for phase, (taken, reserved) in self._meter.peaks.items()
            if phase in peaks and taken
        ]

    @property
    def gpu_peak_bytes(self) -> int | None:
        """The most that torch's allocator has held; the meter starts its mark anew with each phase."""
        if self._device.type != "cuda":
            return None
        past = max((reserved for _, reserved in self._meter.peaks.values()), default=0)
        return max(past, torch.cuda.max_memory_reserved(self._device))

    def close(self) -> None:
        """The run is over: its line in the ledger."""
        if self._ledger is not None:
            record(self._ledger, self.measured())


def versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
