"""Where the tokens of a GPU's steps are drawn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minicpm_cli.engine.graphs import DeviceDraw
from minicpm_cli.engine.penalties import Penalties
from minicpm_cli.engine.runner import _kernel_draws
from quant.kernels import targets

MODEL: Any = SimpleNamespace(device=torch.device("cuda", 6), cfg=SimpleNamespace(vocab=50))
CONFIG: Any = SimpleNamespace(rows=2)


@pytest.mark.parametrize(("installed", "capability"), [(False, (9, 0)), (True, (7, 5))])
def test_the_host_draws_where_triton_cannot(
    installed: bool, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "triton_compiles", targets.triton_compiles.__wrapped__)
    monkeypatch.setattr(targets, "find_spec", lambda _: object() if installed else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert _kernel_draws(CONFIG, MODEL) is None


def test_the_likeliest_token_of_scores_in_the_models_type() -> None:
    """Without kernels; a peak is told in float32."""
    cpu = torch.device("cpu")
    scores = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    scores[1, [7, 30]] = 9.0
    ids, peaks = torch.empty(3, dtype=torch.int64), torch.empty(3)
    DeviceDraw(None, Penalties(50, cpu))(scores, "greedy", {}, ids, peaks)
    assert (ids.tolist(), peaks.tolist()) == (scores.float().argmax(-1).tolist(), scores.float().amax(-1).tolist())
    assert ids[1] == 7
