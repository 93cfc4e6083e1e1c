"""Which layers transformers takes for packed in our GPTQ folders; by_hand.py loads them, with optimum and GPTQModel.

Source: optimum's GPTQQuantizer.convert_model: every linear layer of the blocks, or those whose names end as an entry of
modules_in_block_to_quantize does. The head is never packed, and nothing says so when a file holds a packed one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from folders import quantize, write_plain
from safetensors import safe_open

NOTE = "transformers does not read"


def packed_for_transformers(folder: Path) -> set[str]:
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    names = [name for stage in config.get("modules_in_block_to_quantize") or [] for name in stage]
    linear = {name.rpartition(".")[0] for name in stored(folder) if "_proj." in name}
    return {layer for layer in linear if not names or layer.endswith(tuple(names))}


def stored(folder: Path) -> list[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return list(file.keys())


def packed(folder: Path) -> set[str]:
    return {name.removesuffix(".qweight") for name in stored(folder) if name.endswith(".qweight")}


@pytest.mark.parametrize(
    ("args", "read"),
    [
        ((), True),
        (("--skip", "*.down_proj"), True),
        (("--skip", "*.down_proj", "--skip", "*.self_attn.*"), True),
        (("--skip", "*.0.mlp.down_proj"), False),
        (("--skip", "*.layers.0.*"), False),
        (("--head-bits", "8"), False),
    ],
)
def test_folders_that_transformers_reads_wrong_are_named(
    args: tuple[str, ...], read: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = write_plain(tmp_path / "plain")
    out = quantize(plain, tmp_path / "out", "--method", "rtn", "--group-size", "32", *args)
    assert (packed_for_transformers(out) == packed(out)) == read
    assert (NOTE in capsys.readouterr().err) == (not read)
