"""From a checkpoint on disk to a Decoder on its device, tensor by tensor, with every tensor accounted for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from minicpm_cli.kernels.ops import ops_for
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.decoder import Decoder
from minicpm_cli.model.load_scheme import AS_STORED, LoadScheme
from minicpm_cli.model.lora import Adapter
from minicpm_cli.model.lora_source import Factors, LoraSource
from minicpm_cli.model.quantizing_source import QuantizingSource
from minicpm_cli.model.source import TensorSource, open_source
from minicpm_cli.model.weights import Weights

# Tables that older checkpoints store beside the weights; they are recomputed from the config.
DERIVED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


def load_model(
    path: Path,
    cfg: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Callable[[int, int], None] | None = None,
    *,
    scheme: LoadScheme = AS_STORED,
    gptq_format: str | None = None,
    kernels: Path | None = None,
    adapter: Adapter | None = None,
) -> Decoder:
    """Loads the checkpoint in `path` (a folder or a .gguf file); `on_progress` hears (layers done, layers).

    `scheme` quantizes on the way; `gptq_format` (v1, v2) is for GPTQ files that do not say theirs. Raises WeightsError
    for any tensor that is missing, left over, or of the wrong shape or type. Compiled kernels are kept in `kernels`.
    `adapter` is merged into what is plain, before anything is quantized, and stays beside what is packed.
    """
    source = open_source(path, cfg, gptq_format, device)
    return build_decoder(source, cfg, device, dtype, on_progress, scheme=scheme, kernels=kernels, adapter=adapter)


def build_decoder(
    source: TensorSource,
    cfg: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Callable[[int, int], None] | None = None,
    *,
    scheme: LoadScheme = AS_STORED,
    kernels: Path | None = None,
    adapter: Adapter | None = None,
) -> Decoder:
    """A decoder from any source of tensors, its matrices quantized by `scheme` as they come."""
    for name in sorted(source.names()):
        if name.endswith(DERIVED):
            source.ignore(name)
    beside: dict[str, Factors] = {}
    if adapter is not None:
        cfg = adapter.adapted(cfg)
        source = LoraSource(source, adapter, dtype if scheme == AS_STORED else torch.float32, beside=beside)
    if scheme.linear:
        source = QuantizingSource(source, scheme, device)
    weights = Weights(source, device, dtype, scheme, kernels, beside)
    with _closed_on_errors(source), torch.inference_mode():
        decoder = Decoder(cfg, weights, ops_for(device, kernels), on_progress)
    source.finish()
    return decoder


@contextmanager
def _closed_on_errors(source: TensorSource) -> Iterator[None]:
    """A load that fails or is interrupted leaves no file open, and no thread or pinned buffer of the staging behind."""
    try:
        yield
    except BaseException:
        with suppress(Exception):  # the tensors that nobody asked for are not the news
            source.finish()
        raise
