"""Holds what a checkpoint says of its packing against what its files hold, and opens it accordingly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from minicpm_cli.errors import UnsupportedModel, UsageError, WeightsError
from minicpm_cli.model.quant_config import QuantConfig, Version
from minicpm_cli.model.quantized_source import FileSource, QuantizedSource

# Endings of tensor names that only quantizers write, and the methods that write them.
MARKS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        ".qweight": ("gptq", "awq"),
        ".weight.quant_state.bitsandbytes__nf4": ("bitsandbytes",),
        ".weight.quant_state.bitsandbytes__fp4": ("bitsandbytes",),
        ".weight.absmax": ("bitsandbytes",),
        ".SCB": ("bitsandbytes",),
        ".weight_packed": ("compressed-tensors",),
        ".weight_scale": ("compressed-tensors", "fp8"),
        ".weight_scale_inv": ("fp8",),
    }
)
VERSIONS: Mapping[str, Version] = MappingProxyType({"v1": "gptq", "v2": "gptq_v2"})


def open_quantized(source: FileSource, folder: Path, gptq_format: str | None = None) -> QuantizedSource | FileSource:
    """`source`, with packed matrices under their plain names if there are any.

    `gptq_format` (v1, v2) overrules what the checkpoint says of its zero points. Raises WeightsError where the
    config and the files disagree, UnsupportedModel for packings that are not read.
    """
    config, found = read_config(folder, gptq_format), _found(source.names())
    if config is None and found is None:
        return source
    if config is None:
        raise WeightsError(
            f"{folder} holds quantized tensors ({' or '.join(found or ())}), but config.json has no "
            "quantization_config and there is no quantize_config.json. Fetch the config files of the quantized model."
        )
    if found is None:
        raise WeightsError(
            f"{config.origin} says that the weights are quantized ({config.name}), but the files hold plain tensors. "
            "Fetch the quantized files, or remove quantization_config."
        )
    if config.method not in found:
        raise WeightsError(
            f"{config.origin} says that the weights are quantized with {config.method}, but the files hold tensors of "
            f"{' or '.join(found)}: they belong to different models"
        )
    return QuantizedSource(source, config)


def read_config(folder: Path, gptq_format: str | None = None) -> QuantConfig | None:
    """What the checkpoint says, `gptq_format` applied. Raises UnsupportedModel, ConfigError or UsageError."""
    config = QuantConfig.read(folder)
    if gptq_format:
        if config is None or config.method != "gptq":
            kind = config.method if config else "not quantized"
            raise UsageError(
                f"--gptq-format {gptq_format} is for GPTQ checkpoints, and {folder} is {kind}; leave it out"
            )
        return replace(config, version=VERSIONS[gptq_format])
    if config and config.method == "gptq" and config.version is None and not config.scheme.symmetric:
        raise UnsupportedModel(
            f"{config.origin}: asymmetric GPTQ without checkpoint_format: its zero points can be read in two ways, one "
            "of which gives nonsense. Give --gptq-format v1 (AutoGPTQ and most others) or v2 and look at the answers."
        )
    return config


def _found(names: Iterable[str]) -> tuple[str, ...] | None:
    endings = tuple(MARKS)
    name = next((n for n in names if n.endswith(endings)), None)
    return None if name is None else next(methods for mark, methods in MARKS.items() if name.endswith(mark))
