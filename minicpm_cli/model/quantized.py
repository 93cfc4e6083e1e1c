"""Recognises checkpoints that are already quantized, by what config.json says and by what the files hold."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from minicpm_cli.errors import UnsupportedModel, WeightsError

# Endings of tensor names that only quantizers write.
MARKS = {
    ".qweight": "gptq or awq",
    ".weight.absmax": "bitsandbytes 4-bit",
    ".SCB": "bitsandbytes 8-bit",
    ".weight_packed": "compressed-tensors",
    ".weight_scale": "fp8",
    ".weight_scale_inv": "fp8",
}


def refuse_quantized(folder: Path, names: Iterable[str]) -> None:
    """Raises UnsupportedModel for a quantized checkpoint, WeightsError where config.json and the files disagree."""
    said, found = _said(folder), _found(names)
    if said and not found:
        raise WeightsError(
            f"{folder / 'config.json'} says that the weights are quantized ({said}), but the files hold plain tensors. "
            "Fetch the quantized files, or remove quantization_config."
        )
    if found:
        raise UnsupportedModel(
            f"{folder} is quantized ({said or found}); loading such checkpoints is not supported. "
            "Use the unquantized checkpoint or a GGUF file."
        )


def _found(names: Iterable[str]) -> str | None:
    endings = tuple(MARKS)
    for name in names:
        if name.endswith(endings):
            return next(scheme for mark, scheme in MARKS.items() if name.endswith(mark))
    return None


def _said(folder: Path) -> str | None:
    try:
        raw: Any = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None  # a model may come without one (then its config was given otherwise)
    scheme = raw.get("quantization_config") if isinstance(raw, dict) else None
    if not isinstance(scheme, dict):
        return None
    method = scheme.get("quant_method") or "unnamed method"
    bits = scheme.get("bits")
    return f"{method}, {bits} bits" if bits else str(method)
