"""Opens the tensors of a folder as its config says that they are packed."""

from __future__ import annotations

from pathlib import Path

from minicpm_cli.model.quant_config import read_config
from minicpm_cli.model.quant_marks import check_marks
from minicpm_cli.model.quantized_source import FileSource, QuantizedSource


def open_quantized(source: FileSource, folder: Path, gptq_format: str | None = None) -> QuantizedSource | FileSource:
    """`source`, with packed matrices under their plain names if there are any.

    `gptq_format` (v1, v2) overrules what the checkpoint says of its zero points. Raises WeightsError where the
    config and the files disagree, UnsupportedModel for packings that are not read.
    """
    config = read_config(folder, gptq_format)
    check_marks(config, source.names(), folder)
    return source if config is None else QuantizedSource(source, config)
