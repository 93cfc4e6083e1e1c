"""bitsandbytes folders both ways through transformers, on the CPU."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import logits_of, open_theirs, our_logits, quantize, write_plain
from safetensors.torch import load_file
from torch import Tensor

from quant.formats import int8, nf4
from steps import relative_error

pytest.importorskip("accelerate")  # transformers loads bitsandbytes folders only beside it
pytest.importorskip("bitsandbytes")

LAYER = "model.layers.1.mlp.down_proj"
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
KINDS: dict[str, dict[str, Any]] = {
    "nf4": NF4,
    "nf4-nested": NF4 | {"bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}
# bitsandbytes' own products on the CPU: NF4 in bfloat16 whatever comes in, LLM.int8 with activations of 8 bits, which
# our CPU path leaves as they are. Weights and logits are the same once transformers has dequantized.
LIVE = {"nf4": 0.02, "nf4-nested": 0.02, "int8": 0.05}


def quantize_with_transformers(plain: Path, out: Path, kind: str, dtype: torch.dtype = torch.float32) -> None:
    from transformers import BitsAndBytesConfig

    model = open_theirs(plain, dtype, quantization_config=BitsAndBytesConfig(**KINDS[kind]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(out)


def dequantized(folder: Path) -> torch.nn.Module:
    """transformers' model with plain weights in place of the packed ones."""
    model = open_theirs(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.dequantize(torch.float32).float()


@pytest.mark.parametrize("kind", KINDS)
def test_we_read_what_transformers_writes(kind: str, tmp_path: Path) -> None:
    plain, folder = write_plain(tmp_path / "plain"), tmp_path / "packed"
    quantize_with_transformers(plain, folder, kind)
    ours = our_logits(folder)
    assert relative_error(ours, logits_of(dequantized(folder))) < 1e-5
    assert relative_error(ours, logits_of(open_theirs(folder))) < LIVE[kind]
    assert relative_error(ours, our_logits(plain)) > 2e-3  # it is another model


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_in_bfloat16_is_the_same_in_bfloat16(kind: str, tmp_path: Path) -> None:
    """The usual case: their scales belong to weights that were rounded to bfloat16, and so are their products."""
    plain, folder = write_plain(tmp_path / "plain", torch.bfloat16), tmp_path / "packed"
    quantize_with_transformers(plain, folder, kind, torch.bfloat16)
    ours = our_logits(folder, torch.bfloat16)
    assert relative_error(ours, logits_of(open_theirs(folder, torch.bfloat16))) < LIVE[kind]


@pytest.mark.parametrize("method", ["nf4", "int8"])
def test_transformers_reads_what_we_write(method: str, tmp_path: Path) -> None:
    plain, folder = write_plain(tmp_path / "plain"), tmp_path / "packed"
    quantize(plain, folder, "--method", method)
    ours = our_logits(folder)
    model = open_theirs(folder)
    kinds = {type(module).__name__ for name, module in model.named_modules() if name.endswith("_proj")}
    assert kinds == {"Linear4bit" if method == "nf4" else "Linear8bitLt"}
    assert relative_error(logits_of(model), ours) < LIVE[method]
    plainer = dequantized(folder)
    # transformers rounds NF4 weights to the file's bfloat16; ours are not rounded where products are in float32.
    assert relative_error(logits_of(plainer), ours) < (0.01 if method == "nf4" else 1e-5)
    packed = (nf4 if method == "nf4" else int8).unpack(layer(folder))
    rounded = packed.dequantize(torch.bfloat16 if method == "nf4" else torch.float32)
    assert torch.equal(rounded.float(), plainer.get_parameter(f"{LAYER}.weight"))


def layer(folder: Path) -> dict[str, Tensor]:
    return {n[len(LAYER) + 1 :]: t for n, t in tensors(folder).items() if n.startswith(LAYER)}


@pytest.mark.parametrize("method", ["nf4", "int8"])
def test_we_and_transformers_write_the_same_tensors(method: str, tmp_path: Path) -> None:
    plain = write_plain(tmp_path / "plain", torch.bfloat16)
    quantize(plain, tmp_path / "ours", "--method", method)
    quantize_with_transformers(plain, tmp_path / "theirs", method, torch.bfloat16)
    ours, theirs = (tensors(tmp_path / name) for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert {n: (t.dtype, t.shape) for n, t in ours.items() if not n.endswith("nf4")} == {
        n: (t.dtype, t.shape) for n, t in theirs.items() if not n.endswith("nf4")
    }
    for name, tensor in theirs.items():
        same = (ours[name] == tensor).float().mean() if not name.endswith("nf4") else 1.0
        assert same > (0.999 if name.endswith("_proj.weight") else 0.9999), name  # of ties, some go the other way


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")
