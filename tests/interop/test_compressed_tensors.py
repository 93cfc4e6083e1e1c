"""compressed-tensors folders both ways, by its own compressor and through transformers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import FAMILY, logits_of, open_theirs, our_logits, quantize, their_logits, write_plain
from torch import Tensor

from checkpoint_quantized import RECIPES, Recipe, write_quantized
from quant.formats import compressed
from quant.pack import GroupInt
from quant.rtn import rtn
from quant.scheme import Scheme
from steps import relative_error

pytest.importorskip("compressed_tensors")

N, K = 96, 256
SCHEMES = [
    Scheme("int", bits, group, symmetric=sym) for bits in (4, 8) for group in (32, 128, -1) for sym in (True, False)
]
by_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name.replace(" ", "-"))


def weights_scheme(scheme: Scheme) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = {"num_bits": scheme.bits, "type": "int", "symmetric": scheme.symmetric}
    grouped = {"strategy": "channel"} if scheme.group == -1 else {"strategy": "group", "group_size": scheme.group}
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args, **grouped))


def packed_weights(scheme: Scheme) -> GroupInt:
    draw = torch.Generator().manual_seed(0)
    return rtn(torch.randn(N, K, generator=draw) + 0.7 * torch.randn(N, 1, generator=draw), scheme)


def pack_quantized() -> Any:
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor

    return PackedQuantizationCompressor


@by_scheme
def test_their_reader_computes_our_weights(scheme: Scheme) -> None:
    packed = packed_weights(scheme)
    tensors = compressed.pack(packed)
    tensors["weight_scale"] = tensors["weight_scale"].float()
    theirs = pack_quantized().decompress(tensors, weights_scheme(scheme))["weight"]
    assert torch.equal(theirs, packed.dequantize())


@by_scheme
def test_we_read_what_their_packer_writes(scheme: Scheme) -> None:
    packed = packed_weights(scheme)
    _, zero = packed.unsigned()
    signed = (zero.int() - 2 ** (scheme.bits - 1)).to(torch.int8)
    plain = {"weight": packed.dequantize(), "weight_scale": packed.scale.float(), "weight_zero_point": signed}
    if scheme.symmetric:
        del plain["weight_zero_point"]
    theirs = pack_quantized().compress(plain, weights_scheme(scheme))
    assert torch.equal(compressed.unpack(theirs, scheme.bits, scheme.group).dequantize(), packed.dequantize())
    ours = compressed.pack(packed)
    assert all(torch.equal(ours[name], theirs[name].to(ours[name].dtype)) for name in ours)


def recipe_of(scheme: Scheme) -> Recipe:
    """The folders of tests/checkpoint_quantized.py, at this scheme."""
    kept = RECIPES["packed-8-row" if scheme.group == -1 else "packed-4"]
    weights = dict(kept.config["config_groups"]["group_0"]["weights"])
    weights |= {"num_bits": scheme.bits, "symmetric": scheme.symmetric}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return Recipe(scheme, kept.config | {"config_groups": {"group_0": group}}, compressed.pack)


FOLDERS = [
    Scheme("int", 4, 32),
    Scheme("int", 8, 32),
    Scheme("int", 4, -1),
    Scheme("int", 8, -1),
    Scheme("int", 4, 32, symmetric=False),
]


@pytest.mark.parametrize("scheme", FOLDERS, ids=lambda s: s.name.replace(" ", "-"))
def test_transformers_reads_our_folders(scheme: Scheme, tmp_path: Path) -> None:
    from transformers import CompressedTensorsConfig

    meant = write_quantized(tmp_path, FAMILY, recipe_of(scheme))
    # Without dequantize=True transformers 5.24 refuses any asymmetric folder, compressed-tensors' own ones too; with it
    # the weights are computed in the type of the scales, float16.
    options = {} if scheme.symmetric else {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    tolerance = 1e-5 if scheme.symmetric else 1e-3
    model = open_theirs(tmp_path, **options)
    assert relative_error(logits_of(model), our_logits(tmp_path)) < tolerance
    name = "model.layers.1.mlp.down_proj.weight"
    assert relative_error(model.get_parameter(name).detach(), meant[name]) < tolerance


def write_theirs(plain: Path, folder: Path, scheme: Any, form: str) -> Tensor:
    """Compresses a plain checkpoint to the nearest by their means alone; returns the logits just before saving."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config

    model = open_theirs(plain)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], format=form)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        apply_quantization_config(model, config)
        for module in model.modules():
            if hasattr(module, "weight_scale"):
                set_scale(module, scheme.weights)
                module.quantization_status = QuantizationStatus.FROZEN
        logits = logits_of(model)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(folder)
        compressor.update_config(folder)
    return logits


def set_scale(module: Any, args: Any) -> None:
    n, k = module.weight.shape
    grouped = module.weight.detach().view(n, -1, args.group_size or k)
    low, high = grouped.aminmax(dim=-1)
    high = torch.maximum(high, -low)
    if args.type == "float":
        module.weight_scale.data.copy_(high / 448)
    else:
        module.weight_scale.data.copy_(high / (2 ** (args.num_bits - 1) - 0.5))


@pytest.mark.parametrize("scheme", [s for s in FOLDERS if s.symmetric], ids=lambda s: s.name.replace(" ", "-"))
def test_we_read_their_folders(scheme: Scheme, tmp_path: Path) -> None:
    plain = write_plain(tmp_path / "plain")
    logits = write_theirs(plain, tmp_path / "packed", weights_scheme(scheme), "pack-quantized")
    assert relative_error(our_logits(tmp_path / "packed"), logits) < 1e-5
    assert relative_error(their_logits(tmp_path / "packed"), logits) < 1e-5
    assert relative_error(our_logits(plain), logits) > 1e-3


def fp8_scheme() -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = QuantizationArgs(**eight, strategy="channel")
    inputs = QuantizationArgs(**eight, strategy="token", dynamic=True)
    return QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)


def test_we_read_their_fp8_folders(tmp_path: Path) -> None:
    from transformers import CompressedTensorsConfig

    plain = write_plain(tmp_path / "plain")
    logits = write_theirs(plain, tmp_path / "fp8", fp8_scheme(), "float-quantized")
    ours = our_logits(tmp_path / "fp8")
    weights_alone = their_logits(tmp_path / "fp8", quantization_config=CompressedTensorsConfig(dequantize=True))
    assert relative_error(ours, weights_alone) < 1e-5
    assert relative_error(ours, logits) < 0.1  # theirs also rounds the activations, to 3 bits of fraction
    assert relative_error(our_logits(plain), ours) > 0.01


def test_transformers_reads_our_fp8_folders(tmp_path: Path) -> None:
    from transformers import CompressedTensorsConfig

    out = quantize(write_plain(tmp_path / "plain"), tmp_path / "fp8", "--method", "fp8")
    ours = our_logits(out)
    weights_alone = their_logits(out, quantization_config=CompressedTensorsConfig(dequantize=True))
    assert relative_error(ours, weights_alone) < 1e-5
    assert relative_error(ours, their_logits(out)) < 0.1
