"""What had to be done to a layer beyond the plain solve is in its report, and so in the notes of the whole."""

from __future__ import annotations

import re

import pytest
import torch

from minicpm_cli.quantize.gather import Inputs
from minicpm_cli.quantize.layers import Group, Layer
from minicpm_cli.quantize.recipe import Recipe
from minicpm_cli.quantize.solve import solve
from quant.hessian import Hessian

GROUP = Group("attention.out", (Layer("a.o_proj", 8, 64),))


def inputs(x: torch.Tensor, bent: float = 0.0) -> Inputs:
    hessian = Hessian(64, torch.device("cpu"))
    hessian.add(x)
    hessian._sum -= bent * torch.ones(64, 64).tril(-1)  # beyond what any inputs give: no damping makes it positive
    return Inputs(hessian, None)


@pytest.mark.parametrize(
    ("bent", "channels", "damp", "said"),
    [
        (0.0, 64, 0.01, ""),
        (0.0, 32, 1e-9, r"damping raised to 0\.\d+"),
        (100.0, 64, 0.01, "the Hessian cannot be factored, not even with a damping of 10"),
    ],
    ids=["as it should be", "every channel twice", "nothing helps"],
)
def test_the_report_says_what_a_layer_took(bent: float, channels: int, damp: float, said: str) -> None:
    torch.manual_seed(3)
    x = torch.randn(400, channels).repeat_interleave(64 // channels, 1)
    (solved,) = solve(GROUP, [torch.randn(8, 64)], inputs(x, bent), Recipe(group=32, damp=damp), torch.float32)
    assert re.fullmatch(said, solved.report.note or "")
    assert solved.report.tokens == 400
