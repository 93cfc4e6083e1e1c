"""What a kernel's form must pass before it is trusted."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from quant.kernels import rows_bulk, trial
from quant.kernels.layout import DeviceInt
from quant.kernels.nvrtc import KernelError

BF16, CPU = torch.bfloat16, torch.device("cpu")


def exact(x, weight, onto):
    plain = weight.dequantize() if isinstance(weight, DeviceInt) else weight
    return (onto.double() + x.double() @ plain.double().T / 2).to(x.dtype)


def tried(product, bits=16, kind=0, run=1):
    make = partial(trial.weight, bits, 0, kind, run, BF16, 88, 256, CPU)
    return trial.disagreement(product, make, 13, BF16, CPU)


@pytest.mark.parametrize(("bits", "kind", "run"), [(16, 0, 1), (4, 0, 4), (4, 1, 3), (8, 2, 1), (8, 1, 1 << 20)])
def test_a_right_product_passes(bits, kind, run):
    assert tried(exact, bits, kind, run) is None


def test_what_is_wrong_is_said():
    assert "off by" in (tried(lambda x, w, onto: exact(x, w, onto) * 1.02) or "")
    assert tried(lambda x, w, onto: exact(x, w, onto) * torch.nan) is not None
    assert "every run" in (tried(lambda x, w, onto: exact(x, w, onto) + torch.rand(1).to(BF16)) or "")

    def refused(x, w, onto):
        raise KernelError("CUDA refused a kernel")

    assert tried(refused) == "CUDA refused a kernel"


@pytest.mark.parametrize(("refused", "ready"), [(None, True), ("a product is off", False)])
def test_a_product_is_ready_where_its_form_passed(monkeypatch, refused, ready):
    forms = []
    monkeypatch.setattr(rows_bulk, "disagreement", lambda form, device, folder: forms.append(form) or refused)
    monkeypatch.setattr(rows_bulk.Product, "prepare", lambda self, rows, form: (form, None, None))
    product = rows_bulk.Product(torch.zeros(288, 1056, dtype=BF16), BF16)
    assert product.ready(17) is ready
    assert product.ready(17) is ready
    assert forms == [rows_bulk.choose(17, product.weight, BF16)]
