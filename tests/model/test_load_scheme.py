"""Quantizing while loading: what becomes packed and what must not, how it is named, planned and refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoints import checkpoint_config, is_tied, state_dict
from minicpm_cli.errors import UsageError, WeightsError
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.decoder import Decoder
from minicpm_cli.model.load_scheme import LoadScheme, fitted, weight_bytes
from minicpm_cli.model.loader import build_decoder
from minicpm_cli.model.quantizing_source import QuantizingSource
from quant.pack import Packed
from quant.rtn import rtn
from quant.scheme import Scheme
from steps import DictSource, all_logits, decoder_of, relative_error

CPU = torch.device("cpu")
FAMILIES = ("minicpm5-1b", "minicpm-2b", "minicpm3-4b", "minicpm-moe-8x2b")
SCHEMES = ("w4", "w8", "nf4", "int8", "fp8")
IDS = [1, 20, 33, 300, 7, 7, 250, 12, 99]
# Everything that a block multiplies by, except the router and MLA's kv_b, which is multiplied out when it is loaded.
LINEAR = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "q_a_proj",
    "q_b_proj",
    "w1",
    "w2",
    "w3",
)


def config(family: str) -> ModelConfig:
    return ModelConfig.from_hf(checkpoint_config(family)).with_context(64)


def weights(family: str) -> dict[str, torch.Tensor]:
    state = state_dict(family)
    if is_tied(checkpoint_config(family)):
        del state["lm_head.weight"]
    return state


def load(
    family: str, state: dict[str, torch.Tensor], scheme: LoadScheme, dtype: torch.dtype = torch.float32
) -> Decoder:
    return build_decoder(DictSource(state), config(family), CPU, dtype, scheme=scheme)


def rounded(state: dict[str, torch.Tensor], scheme: LoadScheme) -> dict[str, torch.Tensor]:
    """The plain weights that a model quantized while loading stands for."""
    meant = dict(state)
    for name, tensor in state.items():
        module = name.removesuffix(".weight").rpartition(".")[2]
        own = fitted(scheme.linear, tensor.shape[-1]) if scheme.linear else None
        if own and (module in LINEAR or module == "kv_a_proj_with_mqa"):
            meant[name] = rtn(tensor, own).dequantize()
    return meant


@pytest.mark.parametrize("quantize", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_linear_layers_are_rounded_and_nothing_else(family: str, quantize: str) -> None:
    state, scheme = weights(family), LoadScheme.of(quantize, 16)
    got = all_logits(load(family, state, scheme), IDS)
    assert relative_error(got, all_logits(decoder_of(config(family), rounded(state, scheme)), IDS)) < 1e-5
    assert relative_error(got, all_logits(decoder_of(config(family), state), IDS)) > 1e-4, "it was rounded at all"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", ["minicpm4-0.5b", "minicpm5-1b"])
def test_the_head_is_rounded_and_a_tied_embedding_is_not(family: str, bits: int) -> None:
    state = weights(family)
    decoder = load(family, state, LoadScheme.of(None, bits))
    assert torch.equal(decoder.embed.table, state["model.embed_tokens.weight"].float())
    head = state.get("lm_head.weight", state["model.embed_tokens.weight"])
    own = LoadScheme.of(None, bits).matrix("lm_head.weight", head.shape[1])
    assert own is not None
    assert own.bits == bits
    assert torch.equal(decoder.head.dequantize(), rtn(head, own).dequantize())
    meant = state | {"lm_head.weight": rtn(head, own).dequantize()}
    cfg = ModelConfig.from_hf(checkpoint_config(family) | {"tie_word_embeddings": False}).with_context(64)
    assert relative_error(all_logits(decoder, IDS), all_logits(decoder_of(cfg, meant), IDS)) < 1e-5


@pytest.mark.parametrize("quantize", SCHEMES)
def test_bf16_runs_what_was_packed(quantize: str) -> None:
    state, scheme = weights("minicpm5-1b"), LoadScheme.of(quantize, 8)
    exact = all_logits(load("minicpm5-1b", state, scheme), IDS)
    assert relative_error(all_logits(load("minicpm5-1b", state, scheme, torch.bfloat16), IDS), exact) < 0.03


class Counting(DictSource):
    """Hands out copies, and counts those that are still alive."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.alive = self.most = 0

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        import weakref

        copy = super().take(name, shape).clone()
        self.alive += len(shape) == 2
        self.most = max(self.most, self.alive)
        weakref.finalize(copy, self._gone, len(shape) == 2)
        return copy

    def _gone(self, matrix: bool) -> None:
        self.alive -= matrix


def test_one_plain_matrix_at_a_time() -> None:
    """Gate and up become one layer, yet the first is packed before the second is taken."""
    source = Counting(weights("minicpm5-1b"))
    build_decoder(source, config("minicpm5-1b"), CPU, torch.bfloat16, scheme=LoadScheme.of("w4", 16))
    assert source.most <= 2  # the embedding, and one
    plain = Counting(weights("minicpm5-1b"))
    build_decoder(plain, config("minicpm5-1b"), CPU, torch.bfloat16)
    assert plain.most > 2


def test_what_is_packed_is_not_packed_again() -> None:
    packed: Packed = rtn(torch.randn(8, 64), Scheme("int", 8, 32))

    class Holding(DictSource):
        def take(self, name: str, shape: tuple[int, ...]) -> Packed:  # type: ignore[override]
            return packed

    source = QuantizingSource(Holding({}), LoadScheme.of("w4", 16), CPU)  # type: ignore[arg-type]
    with pytest.raises(WeightsError, match="packed already"):
        source.take("model.layers.0.self_attn.q_proj.weight", (8, 64))


def test_weights_that_are_not_numbers_are_named() -> None:
    name, state = "model.layers.1.mlp.up_proj.weight", weights("minicpm5-1b")
    state[name] = torch.full_like(state[name], torch.nan)
    with pytest.raises(WeightsError, match=f"{name} cannot be quantized to w4"):
        load("minicpm5-1b", state, LoadScheme.of("w4", 16))


def test_groups_follow_the_rows() -> None:
    four = LoadScheme.of("w4", 16).linear
    assert four is not None
    assert [s and s.group for s in (fitted(four, k) for k in (4096, 1536, 576, 1440, 48))] == [128, 128, 64, 32, None]
    assert fitted(Scheme("int", 8), 40) == Scheme("int", 8, -1)
    assert fitted(Scheme("nf4"), 576) == Scheme("nf4")


def test_names_and_details_for_people() -> None:
    cfg = config("minicpm5-1b")  # rows of 192, 256 and 576
    assert LoadScheme.of("w4", 16).name(cfg, "bf16") == "w4 g64/g128 asym"
    assert LoadScheme.of("w8", 8).name(cfg, "bf16") == "w8 row sym, head w8"
    assert LoadScheme.of("w8", 4).name(cfg, "bf16") == "w8 row sym, head w4"
    assert LoadScheme.of("fp8", 16).name(cfg, "bf16") == "fp8"
    assert LoadScheme.of(None, 16).name(cfg, "bf16") == "bf16"
    assert LoadScheme.of(None, 8).name(cfg, "gptq w4 g32 sym") == "gptq w4 g32 sym, head w8"
    assert LoadScheme.of("w4", 16).details(cfg) == (
        "quantized while loading, of 14 matrices: 12 in w4 g64 asym, 2 in w4 g128 asym",
    )
    mla = LoadScheme.of("w4", 16).details(config("minicpm3-4b"))
    assert mla[0].endswith("2 in full")  # kv_b of both layers


def test_a_model_of_which_nothing_can_be_quantized(tmp_path: Path) -> None:
    odd = ModelConfig.from_hf(
        checkpoint_config("minicpm5-1b")
        | {
            "hidden_size": 40,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "intermediate_size": 24,
        }
    )
    with pytest.raises(UsageError, match="no matrix of this model"):
        LoadScheme.of("w4", 16).check(odd)
    LoadScheme.of("int8", 16).check(odd)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantize", [None, *SCHEMES])
def test_the_plan_is_what_the_weights_take(family: str, quantize: str | None) -> None:
    scheme = LoadScheme.of(quantize, 8)
    planned = weight_bytes(config(family), 2, scheme.matrix, cpu=True)
    assert load(family, weights(family), scheme, torch.bfloat16).weight_bytes == pytest.approx(planned, rel=0.25)
