"""What a GGUF file cannot say: llama.cpp's converter has no key for two models' activation and RoPE scaling.

MiniCPM-S-1B computes with (fat)ReLU, MiniCPM-2B-128k stretches its RoPE by dynamic NTK; read by their keys alone, both
would silently become other models. Here they are known by name and shape, and whatever is concluded is said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from minicpm_cli.model.gguf_header import GGUFHeader

NOTES = "gguf_notes"
_NAMES = re.compile(r"general\.(.*\.)?(name|basename|finetune|url|repo_url|repository)")
_S_1B, _1B, _2B_128K = (re.compile(p) for p in (r"minicpm-s(-|$)|prosparse", r"minicpm-1b", r"minicpm-2b-128k"))
_SHAPE_1B = {"hidden_size": 1536, "num_hidden_layers": 52}  # of MiniCPM-1B and of MiniCPM-S-1B
_TRAINED_128K, _CONTEXTS_128K = 65536, (65536, 131072)
_THETA_128K = 1e6

_FAT = (
    "this GGUF file is called MiniCPM-S; GGUF has no key for its activation, so that model's own is used: {}. "
    "If it is another model, use its safetensors"
)
_EITHER = (
    "this GGUF file may be MiniCPM-1B or MiniCPM-S-1B, which differ only in the activation, for which GGUF has no key; "
    "it runs as MiniCPM-1B (silu). MiniCPM-S-1B or MiniCPM-1B in the file's name settles it"
)
_LONG = (
    "this GGUF file looks like MiniCPM-2B-128k; GGUF has no key for its dynamic RoPE scaling, so that model's own is "
    f"used: none up to {_TRAINED_128K} tokens of context, factor 4 beyond"
)


def lost_keys(header: GGUFHeader, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json that the conversion lost, with a note for each conclusion under `gguf_notes`."""
    names = _names(header)
    found: dict[str, Any] = {NOTES: ()}
    for keys, note in (_activation(names, config), _dynamic(names, config)):
        found |= keys
        found[NOTES] += (note,) if note else ()
    return found if found[NOTES] else {}


def _names(header: GGUFHeader) -> list[str]:
    """Everything that may name the model, alike in spelling; a file in the hub's cache lies under its repository."""
    stated = [v for k, v in header.metadata.items() if _NAMES.fullmatch(k) and isinstance(v, str)]
    repository = [part for part in header.path.parts[:-1] if part.startswith("models--")]
    return [re.sub(r"[^a-z0-9]+", "-", name.lower()) for name in (*stated, *repository, header.path.stem)]


def _activation(names: list[str], config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    mup = config["model_type"] == "minicpm"
    shaped = _SHAPE_1B.items() <= config.items()
    if any(map(_S_1B.search, names)) and (mup or shaped):
        # The authors' llama-format copy of MiniCPM-S has plain ReLU, the original a threshold of 0.03.
        keys = {"hidden_act": "fatrelu", "hidden_act_param": 0.03} if mup else {"hidden_act": "relu"}
        return keys, _FAT.format("fatrelu, threshold 0.03" if mup else "relu")
    return {}, _EITHER if shaped and not any(map(_1B.search, names)) else ""


def _dynamic(names: list[str], config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """A base of 10^6 is this model's alone in the family; a file that states a scaling is believed."""
    shaped = config["model_type"] == "minicpm" and config["max_position_embeddings"] in _CONTEXTS_128K
    known = shaped or any(map(_2B_128K.search, names))
    if not known or config["rope_scaling"] or config["rope_theta"] != _THETA_128K:
        return {}, ""
    scaling = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": _TRAINED_128K}
    return {"rope_scaling": scaling}, _LONG
