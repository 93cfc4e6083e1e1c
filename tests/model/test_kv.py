"""The cache's formats: what they cost is what is planned, and codes with scales lose little of a model's logits."""

from __future__ import annotations

import pytest
import torch

from checkpoints import checkpoint_config, state_dict
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.decoder import Decoder
from minicpm_cli.model.kv import KVCache
from minicpm_cli.model.kv_format import KVFormat
from steps import all_logits, decoder_of, relative_error

CPU = torch.device("cpu")
FAMILIES = ("minicpm4-0.5b", "minicpm-2b", "minicpm3-4b")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def decoder(family: str) -> Decoder:
    raw = checkpoint_config(family)
    return decoder_of(ModelConfig.from_hf(raw), state_dict(family, dtype=torch.float32))


def test_auto_is_the_models_own_dtype() -> None:
    assert KVFormat.of("auto", "fp16") == KVFormat("fp16")
    assert KVFormat.of("fp8", "fp16") == KVFormat("fp8")
    assert not KVFormat.of("auto", "fp32").quantized


@pytest.mark.parametrize("name", ["bf16", "fp32", "fp8", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_allocated_is_what_was_planned(family: str, name: str) -> None:
    cfg, kv_format = ModelConfig.from_hf(checkpoint_config(family)), KVFormat.of(name, "bf16")
    kv = KVCache.allocate(cfg, 5, 4, CPU, DTYPES.get(name, torch.bfloat16), kv_format)
    assert kv.nbytes == 5 * 4 * kv_format.bytes_per_token(cfg)
    assert len(kv.layers) == cfg.layers
    for cache in kv.layers:
        assert (cache.scales is not None) == kv_format.quantized
        assert cache.rows.element_size() == kv_format.element_bytes
        assert cache.k.shape[:2] == cache.v.shape[:2] == (5, 4)


def test_views_are_of_one_buffer() -> None:
    """What is written to a token's row is seen in its keys, its values and their scales."""
    cfg = ModelConfig.from_hf(checkpoint_config("minicpm4-0.5b"))
    cache = KVCache.allocate(cfg, 3, 4, CPU, torch.bfloat16, KVFormat("int8")).layers[1]
    assert cache.scales is not None
    assert cache.k_scale is not None
    assert cache.v_scale is not None
    cache.rows[6], cache.scales[1, 2] = torch.arange(cache.rows.shape[1])[:, None], torch.arange(cache.rows.shape[1])
    heads = cfg.kv_heads
    assert cache.k[1, 2, :, 0].tolist() == cache.k_scale[1, 2].tolist() == list(range(heads))
    assert cache.v[1, 2, :, 0].tolist() == cache.v_scale[1, 2].tolist() == list(range(heads, 2 * heads))


@pytest.mark.parametrize(("name", "bound"), [("int8", 0.02), ("fp8", 0.06)])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_over_codes(family: str, name: str, bound: float) -> None:
    """Between rounding a value to 8 bits (int8: 0.5 / 127 of a row's largest; fp8: 1/16 of the value) and nothing."""
    model, ids = decoder(family), torch.randint(3, 90, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    plain = all_logits(model, ids)
    coded = all_logits(model, ids, [17, 1, 12], kv_format=KVFormat.of(name, "fp32"))
    assert 1e-4 < relative_error(coded, plain) < bound
    assert torch.equal(coded, all_logits(model, ids, [17, 1, 12], kv_format=KVFormat.of(name, "fp32")))
