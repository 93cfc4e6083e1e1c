"""How fast a machine is taken to be."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from minicpm_cli.quantize import setting


class Starting:
    """A matrix whose first product takes longer than all that is measured, as on a GPU whose libraries are loaded."""

    def __init__(self) -> None:
        self.products = 0

    def __matmul__(self, other: Starting) -> Tensor:
        self.products += 1
        time.sleep(2 * setting.PROBE_SECONDS if self.products == 1 else 0.001)
        return torch.zeros(1, 1)


def test_the_start_of_libraries_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setting.torch, "ones", lambda *_, **__: Starting())
    rate = setting.measured_rate(torch.device("cpu"), torch.float32)
    assert rate > 2.0 * setting.PROBE_SIZE**3 / setting.PROBE_SECONDS
