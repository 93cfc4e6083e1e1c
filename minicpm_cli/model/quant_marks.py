"""Holds what a checkpoint says of its packing against the names of the tensors in its files. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from minicpm_cli.errors import WeightsError
from minicpm_cli.model.quant_config import QuantConfig

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


def check_marks(config: QuantConfig | None, names: Iterable[str], folder: Path) -> None:
    """Raises WeightsError where the config and the files of `folder` disagree."""
    found = _found(names)
    if config is None and found is None:
        return
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


def _found(names: Iterable[str]) -> tuple[str, ...] | None:
    endings = tuple(MARKS)
    name = next((n for n in names if n.endswith(endings)), None)
    return None if name is None else next(methods for mark, methods in MARKS.items() if name.endswith(mark))
