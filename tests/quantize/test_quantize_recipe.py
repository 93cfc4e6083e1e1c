"""What may be asked of a quantization, which layers it means, and what is refused before anything loads."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoints import checkpoint_config, tensor_shapes
from minicpm_cli.errors import UsageError
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.quantize.layers import block_prefix, check_layers, refuse_misfits, stages
from minicpm_cli.quantize.recipe import Recipe, matches
from minicpm_cli.quantize.schema import unread_group

FAMILIES = ("minicpm-2b", "minicpm3-4b", "minicpm-moe-8x2b", "minicpm5-1b")


def cfg_of(family: str, **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(checkpoint_config(family) | changes)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "awq"}, "--method awq is not known; it must be one of gptq, rtn, nf4, int8, fp8"),
        ({"bits": 3}, "3 bits are not supported"),
        ({"group": 0}, "--group-size is 0"),
        ({"group": 36}, "group of 36"),
        ({"damp": 0.0}, "--damp is 0.0"),
        ({"damp": 1.0}, "--damp is 1.0; it must be above 0 and below 1"),
        ({"damp": float("nan")}, "--damp is nan"),
        ({"correction": 1.5}, "--correction is 1.5"),
        ({"correction": float("nan")}, "--correction is nan"),
        ({"head_bits": 4}, "--head-bits is 4"),
        ({"head_bits": 8, "method": "nf4"}, "--head-bits 8 goes with --method gptq or rtn"),
        ({"samples": 0}, "--samples is 0"),
        ({"seqlen": 1}, "--seqlen is 1"),
        ({"skip": ("re:[",)}, "not a regular expression"),
        ({"skip": ("",)}, "--skip is empty"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("[", r"\[")):
        Recipe(**options)


def test_the_recipe_is_named_for_people() -> None:
    assert Recipe().name == "gptq w4 g64 sym"
    assert Recipe(act_order=True, symmetric=False).name == "gptq w4 g64 asym act-order"
    assert Recipe(method="rtn", bits=8, group=-1, symmetric=False).name == "rtn w8 row asym"
    assert Recipe(method="nf4").name == "nf4"


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("model.layers.3.mlp.down_proj", True),
        ("mlp.down_proj", True),
        ("*.down_proj", True),
        ("down_*", True),
        ("own_proj", False),
        ("layers.?.mlp.*", True),
        ("re:layers\\.[0-3]\\.", True),
        ("re:^mlp", False),
    ],
)
def test_patterns_name_layers(pattern: str, found: bool) -> None:
    assert matches(pattern, "model.layers.3.mlp.down_proj") is found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_of_a_block_but_the_router_has_its_stage(family: str) -> None:
    shapes = tensor_shapes(checkpoint_config(family))
    found = [layer for s in stages(cfg_of(family), 1, Recipe()) for g in s.groups for layer in g.layers]
    wanted = {
        name: shape
        for name, shape in shapes.items()
        if name.startswith(block_prefix(1)) and len(shape) == 2 and not name.endswith("mlp.gate.weight")
    }
    assert {layer.tensor: (layer.rows, layer.columns) for layer in found} == wanted
    assert len(found) == len(wanted)


def test_what_reads_one_input_is_one_group_and_the_order_is_that_of_the_data() -> None:
    def names(family: str) -> list[list[str]]:
        groups = [group for stage in stages(cfg_of(family), 0, Recipe()) for group in stage.groups]
        return [[layer.name.rsplit(".", 1)[1] for layer in group.layers] for group in groups]

    assert names("minicpm-2b") == [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
    attention = [["q_a_proj", "kv_a_proj_with_mqa"], ["q_b_proj"], ["kv_b_proj"], ["o_proj"]]
    assert names("minicpm3-4b")[:4] == attention
    assert names("minicpm-moe-8x2b")[2:] == [["w1", "w3"]] * 8 + [["w2"]] * 8


def test_skipped_layers_have_no_stage() -> None:
    recipe = Recipe(skip=("*.k_proj", "down_proj"))
    groups = [group for stage in stages(cfg_of("minicpm-2b"), 0, recipe) for group in stage.groups]
    assert [[layer.name.rsplit(".", 1)[1] for layer in g.layers] for g in groups] == [
        ["q_proj", "v_proj"],
        ["o_proj"],
        ["gate_proj", "up_proj"],
    ]


def test_a_layer_that_does_not_divide_is_told_with_what_would() -> None:
    lines = check_layers(cfg_of("minicpm5-1b", hidden_size=576, num_attention_heads=16), Recipe(group=128))
    assert any("576 inputs do not divide by 128; --group-size 32, 64, 96, 192 would" in line for line in lines)
    assert all("--skip" in line for line in lines)
    with pytest.raises(UsageError, match="q_proj 256x576 \\(2 layers\\)"):
        refuse_misfits(lines)
    refuse_misfits([])


def test_rows_must_fill_words_too() -> None:
    lines = check_layers(cfg_of("minicpm5-1b", intermediate_size=580), Recipe(group=-1))
    assert any("gate_proj 580x192" in line and "its 580 rows do not fill whole 32-bit words" in line for line in lines)


def test_a_head_of_an_odd_size_is_told_with_the_layers() -> None:
    """MiniCPM-2B's 122,753 tokens, in the llama format, where the head is one of its own."""
    odd = cfg_of("minicpm5-1b", vocab_size=601)
    (line,) = check_layers(odd, Recipe(group=32, head_bits=8))
    assert line == (
        "lm_head 601x192 (1 layer): its 601 rows do not fill whole 32-bit words; --head-bits 16 leaves it as it is"
    )
    assert check_layers(odd, Recipe(group=32)) == []
    assert "would, or --head-bits 16 leaves" in check_layers(odd, Recipe(group=128, head_bits=8))[-1]
    assert check_layers(cfg_of("minicpm5-1b"), Recipe(group=32, head_bits=8)) == []


def test_a_pattern_that_names_nothing_and_one_that_names_all_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--skip \*.dwn_proj names no layer"):
        check_layers(cfg_of("minicpm-2b"), Recipe(group=32, skip=("*.dwn_proj",)))
    with pytest.raises(UsageError, match="leaves nothing"):
        check_layers(cfg_of("minicpm-2b"), Recipe(group=32, skip=("*",)))


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (Recipe(group=64), None),
        (Recipe(method="rtn", bits=8, group=-1), None),
        (Recipe(method="nf4", group=96), None),
        (Recipe(group=96), "GPTQModel and vLLM will not read groups of 96; 32, 64 and 128 are read everywhere"),
        (Recipe(group=256), "vLLM will not read groups of 256; 32, 64 and 128 are read everywhere"),
    ],
)
def test_groups_that_others_do_not_read_are_named(recipe: Recipe, said: str | None) -> None:
    assert unread_group(recipe) == said
