"""What is measured: a model from disk or a shape with random weights, run by our engine on token ids alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minicpm_cli.bench import machine, peer
from minicpm_cli.bench.rows import Setting
from minicpm_cli.bench.runner import EngineRunner
from minicpm_cli.bench.shapes import raw_config
from minicpm_cli.bench.speed import Workload
from minicpm_cli.bench.weights import RandomSource
from minicpm_cli.engine.engine import Engine
from minicpm_cli.engine.sequence import EngineConfig
from minicpm_cli.hub import resolve
from minicpm_cli.hub.files import read_json
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.decoder import Decoder
from minicpm_cli.model.gguf import config_from_gguf, read_header
from minicpm_cli.model.kv import KVCache
from minicpm_cli.model.loader import build_decoder, load_model
from minicpm_cli.settings import LoadOptions, Settings

PAGE = 16
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that is known but not loaded. `path` is None for random weights."""

    name: str
    scheme: str
    raw: Mapping[str, Any]
    cfg: ModelConfig
    path: Path | None
    device: torch.device
    dtype: torch.dtype

    def setting(self) -> Setting:
        return machine.setting_for(self.device, self.name, self.scheme)

    def peer_setting(self, engine: str) -> Setting:
        """Of an engine that runs dequantized weights."""
        return machine.setting_for(self.device, self.name, dtype_name(self.dtype), engine)

    def runner(self, workloads: Sequence[Workload]) -> EngineRunner:
        return EngineRunner(engine_for(self._decoder(), workloads))

    def peer_runner(self) -> peer.TransformersRunner:
        if self.path is None:
            return peer.TransformersRunner(peer.random_peer(self.raw, self.device, self.dtype))
        return peer.TransformersRunner(peer.load_peer(self.path, self.device, self.dtype))

    def _decoder(self) -> Decoder:
        if self.path is None:
            random = RandomSource(self.cfg, device=self.device, dtype=self.dtype)
            return build_decoder(random, self.cfg, self.device, self.dtype)
        return load_model(self.path, self.cfg, self.device, self.dtype)


def open_subject(load: LoadOptions, shape: str | None, settings: Settings) -> Subject:
    """The shape, or the model that `load` names, fetched if it is not here; no weights are read."""
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if load.device == "auto" else load.device)
    auto = "bf16" if device.type == "cuda" else "fp32"
    dtype = auto if load.dtype == "auto" else load.dtype
    if shape is not None:
        raw = raw_config(shape)
        return Subject(shape, dtype, raw, ModelConfig.from_hf(raw), None, device, DTYPES[dtype])
    path = resolve(load.model, settings).path
    scheme, raw, generation = _described(path)
    cfg = ModelConfig.from_hf(raw, generation)
    return Subject(load.model, scheme or dtype, raw, cfg, path, device, DTYPES[dtype])


def _described(path: Path) -> tuple[str | None, Mapping[str, Any], Mapping[str, Any]]:
    """The scheme if the files are quantized, config.json's contents, generation_config.json's."""
    if path.suffix == ".gguf":
        header = read_header(path)
        stored: Counter[str] = Counter()
        for tensor in header.tensors.values():
            stored[tensor.type] += tensor.nbytes
        return stored.most_common(1)[0][0], config_from_gguf(header), {}
    generation = path / "generation_config.json"
    return None, read_json(path / "config.json"), read_json(generation) if generation.is_file() else {}


def dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)


def engine_for(decoder: Decoder, workloads: Sequence[Workload]) -> Engine:
    """An engine with a seat for each sequence of the largest workload, and pages for all of their tokens."""
    pages = max(w.batch * (-(-(w.prompt + w.new) // PAGE) + 1) for w in workloads) + 1
    config = EngineConfig(
        page_size=PAGE,
        pages=pages,
        max_seqs=max(w.batch for w in workloads),
        max_batch_tokens=2048,
        context=max(w.prompt + w.new for w in workloads) + 1,
        prefix_cache=False,
    )
    kv = KVCache.allocate(decoder.cfg, pages, PAGE, decoder.device, decoder.dtype)
    return Engine(decoder, kv, config)
