"""What is measured: a model from disk or a shape with random weights, run by our engine on token ids alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minicpm_cli.bench import machine, peer
from minicpm_cli.bench.rows import Setting
from minicpm_cli.bench.runner import EngineRunner
from minicpm_cli.bench.shapes import raw_config
from minicpm_cli.bench.speed import Workload
from minicpm_cli.bench.weights import RandomSource
from minicpm_cli.engine.engine import Engine, EngineConfig
from minicpm_cli.hub import resolve
from minicpm_cli.llm.checkpoint import Checkpoint
from minicpm_cli.llm.device import choose_device, choose_dtype, dtype_name
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.decoder import Decoder
from minicpm_cli.model.kv import KVCache
from minicpm_cli.model.load_scheme import AS_STORED, LoadScheme
from minicpm_cli.model.loader import build_decoder
from minicpm_cli.settings import LoadOptions, Settings

PAGE = 16
BATCH_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that is known but not loaded: a `checkpoint`, or the shape `name` with random weights."""

    name: str
    cfg: ModelConfig
    checkpoint: Checkpoint | None
    device: torch.device
    dtype: torch.dtype
    load: LoadScheme = AS_STORED

    @property
    def scheme(self) -> str:
        plain = dtype_name(self.dtype)
        return self.checkpoint.scheme(plain) if self.checkpoint else self.load.name(self.cfg, plain)

    def setting(self) -> Setting:
        return machine.setting_for(self.device, self.name, self.scheme)

    def peer_setting(self, engine: str) -> Setting:
        """Of an engine that runs dequantized weights."""
        return machine.setting_for(self.device, self.name, dtype_name(self.dtype), engine)

    def runner(self, workloads: Sequence[Workload]) -> EngineRunner:
        """Loads the weights."""
        return EngineRunner(engine_for(self._decoder(), workloads))

    def peer_runner(self) -> peer.TransformersRunner:
        """Loads the same model in transformers."""
        if self.checkpoint is None:
            return peer.TransformersRunner(peer.random_peer(raw_config(self.name), self.device, self.dtype))
        return peer.TransformersRunner(peer.load_peer(self.checkpoint.path, self.device, self.dtype))

    def _decoder(self) -> Decoder:
        if self.checkpoint is None:
            source = RandomSource(self.cfg, device=self.device, dtype=self.dtype)
            return build_decoder(source, self.cfg, self.device, self.dtype, scheme=self.load)
        return self.checkpoint.decoder(self.device, self.dtype)


def open_subject(load: LoadOptions, shape: str | None, settings: Settings) -> Subject:
    """The shape, or the model that `load` names, fetched if it is not here; no weights are read."""
    device = choose_device(load.device)
    dtype = choose_dtype(load.dtype, device)
    if shape is not None:
        cfg, scheme = ModelConfig.from_hf(raw_config(shape)), LoadScheme.of(load.quantize, load.head_bits)
        return Subject(shape, cfg, None, device, dtype, scheme)
    checkpoint = Checkpoint.read(resolve(load.model, settings).path).with_options(load)
    return Subject(load.model, checkpoint.cfg, checkpoint, device, dtype)


def engine_for(decoder: Decoder, workloads: Sequence[Workload]) -> Engine:
    """An engine with a seat for each sequence of the largest workload, and pages for all of their tokens."""
    tokens = max(w.prompt + w.new for w in workloads)
    pages = 1 + max(w.batch * (-(-(w.prompt + w.new) // PAGE) + 1) for w in workloads)
    config = EngineConfig(
        page_size=PAGE,
        pages=pages,
        max_seqs=max(w.batch for w in workloads),
        max_batch_tokens=BATCH_TOKENS,
        context=tokens,
        prefix_cache=False,
    )
    kv = KVCache.allocate(decoder.cfg, pages, PAGE, decoder.device, decoder.dtype)
    return Engine(decoder, kv, config)
