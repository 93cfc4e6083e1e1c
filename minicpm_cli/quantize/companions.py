"""The files beside the weights: config, tokenizer, template, licence. Code of the checkpoint stays behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from minicpm_cli.errors import ConfigError
from minicpm_cli.hub.files import read_json
from minicpm_cli.model.gguf import config_from_gguf, read_header
from minicpm_cli.quantize.folder import failed, write_json
from minicpm_cli.text.gguf_vocab import vocabulary_from_gguf
from minicpm_cli.text.template_files import find_template

CONFIG = "config.json"
_COPIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "LICENSE*",
)
_CODE = ".py"
CODE_NOTE = (
    "the checkpoint's own code (*.py, auto_map) was not copied: nothing here runs it. A program that cannot read "
    "{architecture} by itself needs those files from the original."
)


def source_config(path: Path) -> dict[str, Any]:
    """config.json of a folder, or what a GGUF file's metadata amounts to. Raises ConfigError for quantized ones."""
    if not path.is_dir():
        return _from_gguf(path)
    config = read_json(path / CONFIG)
    if "quantization_config" in config or (path / "quantize_config.json").exists():
        raise ConfigError(f"{path} is quantized already; give the original model")
    return config


def is_wide(path: Path) -> bool:
    """Whether the weights are float32, or packed, as far as the config says."""
    if not path.is_dir():
        return True
    config = read_json(path / CONFIG)
    return str(config.get("torch_dtype") or config.get("dtype")).endswith("float32")


def write_companions(path: Path, folder: Path) -> list[str]:
    """Writes all but config.json to `folder`. Returns the names written. Raises FileError or TokenizerError."""
    try:
        return _copy(path, folder) if path.is_dir() else _tokenizer_from_gguf(path, folder)
    except OSError as error:
        raise failed("write", folder, error) from error


def output_config(
    source: Mapping[str, Any], quantization: Mapping[str, Any], *, narrowed: bool, tie: bool
) -> dict[str, Any]:
    """`narrowed`: the source's plain tensors were wider than what is written; `tie` is what the tensors are."""
    config = {key: value for key, value in source.items() if key != "auto_map"} | {"tie_word_embeddings": tie}
    if narrowed:
        config |= {key: "bfloat16" for key in ("torch_dtype", "dtype") if key in config} or {"torch_dtype": "bfloat16"}
    return config | {"quantization_config": dict(quantization)}


def has_code(path: Path, config: Mapping[str, Any]) -> bool:
    return "auto_map" in config or (path.is_dir() and any(file.suffix == _CODE for file in path.iterdir()))


def _copy(path: Path, folder: Path) -> list[str]:
    names = sorted(f.name for f in path.iterdir() if f.is_file() and any(fnmatch(f.name, p) for p in _COPIED))
    names = [name for name in names if not name.endswith(_CODE)]
    for name in names:
        shutil.copyfile(path / name, folder / name)
    if "tokenizer_config.json" in names:
        _without_code(folder / "tokenizer_config.json", fast="tokenizer.json" in names)
    return names


def _without_code(file: Path, *, fast: bool) -> None:
    """A tokenizer class of the checkpoint's own makes room for the one that reads tokenizer.json."""
    config = read_json(file)
    if config.pop("auto_map", None) is None:
        return
    if fast:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(file, config)


def _from_gguf(path: Path) -> dict[str, Any]:
    config = config_from_gguf(read_header(path))
    return {key: value for key, value in config.items() if value is not None} | {"torch_dtype": "bfloat16"}


def _tokenizer_from_gguf(path: Path, folder: Path) -> list[str]:
    vocabulary = vocabulary_from_gguf(path)
    raw = dict(vocabulary.tokenizer)
    if vocabulary.add_bos and vocabulary.bos and not raw.get("post_processor"):
        raw["post_processor"] = _bos_first(vocabulary.bos, raw)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary.bos,
        "eos_token": vocabulary.eos,
        "add_bos_token": vocabulary.add_bos,
        "clean_up_tokenization_spaces": False,
    }
    template = find_template(path)
    if template is not None:
        config["chat_template"] = template.source
    header = config_from_gguf(read_header(path))
    ends = {key: header[key] for key in ("bos_token_id", "eos_token_id") if header.get(key) is not None}
    (folder / "tokenizer.json").write_text(json.dumps(raw, ensure_ascii=False), encoding="utf-8")
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "generation_config.json", ends)
    return ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]


def _bos_first(bos: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """A post-processor that puts BOS before a text, as tokenizer.json describes it."""
    ident = next(token["id"] for token in raw["added_tokens"] if token["content"] == bos)
    start, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [start, text],
        "pair": [start, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [ident], "tokens": [bos]}},
    }
