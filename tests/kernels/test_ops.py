"""Which operations a device gets."""

from __future__ import annotations

import pytest
import torch

from minicpm_cli.kernels.ops import REFERENCE, ops_for


def test_a_gpu_that_triton_does_not_know_takes_the_plain_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert ops_for(torch.device("cuda", 7)) is REFERENCE
