"""What is measured: a model from disk or a shape with random weights, opened as chat and batch open theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from minicpm_cli.bench import machine, peer
from minicpm_cli.bench.folder import write_folder
from minicpm_cli.bench.rows import Setting
from minicpm_cli.bench.runner import EngineRunner, FleetRunner
from minicpm_cli.bench.shapes import raw_config
from minicpm_cli.bench.weights import RandomSource
from minicpm_cli.errors import DeviceError
from minicpm_cli.fleet.fleet import Fleet
from minicpm_cli.fleet.local import starter
from minicpm_cli.hub import resolve
from minicpm_cli.llm.checkpoint import KERNELS, Checkpoint
from minicpm_cli.llm.device import choose_device, choose_dtype, dtype_name
from minicpm_cli.llm.opening import open_engine, plan_engine
from minicpm_cli.llm.prompter import Prompter
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.decoder import Decoder
from minicpm_cli.model.load_scheme import AS_STORED, LoadScheme, weight_bytes
from minicpm_cli.model.loader import build_decoder
from minicpm_cli.settings import LoadOptions, Settings


@dataclass(frozen=True, slots=True)
class RandomCheckpoint:
    """A shape in the place of a `Checkpoint`: the weights are drawn where they are needed."""

    shape: str
    cfg: ModelConfig
    load: LoadScheme = AS_STORED
    kernels: Path | None = None

    @classmethod
    def of(cls, shape: str, options: LoadOptions, kernels: Path | None = None) -> RandomCheckpoint:
        load = LoadScheme.of(options.quantize, options.head_bits)
        return cls(shape, ModelConfig.from_hf(raw_config(shape)), load, kernels)

    def weight_bytes(self, itemsize: int, *, cpu: bool = False) -> int:
        return weight_bytes(self.cfg, itemsize, self.load.matrix, cpu=cpu)

    def scheme(self, plain: str) -> str:
        return self.load.name(self.cfg, plain)

    def decoder(
        self, device: torch.device, dtype: torch.dtype, on_progress: Callable[[int, int], None] | None = None
    ) -> Decoder:
        source = RandomSource(self.cfg, device=device, dtype=dtype)
        return build_decoder(source, self.cfg, device, dtype, on_progress, scheme=self.load, kernels=self.kernels)


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that is known but not loaded."""

    name: str
    checkpoint: Checkpoint | RandomCheckpoint
    options: LoadOptions
    device: torch.device
    dtype: torch.dtype

    @property
    def cfg(self) -> ModelConfig:
        return self.checkpoint.cfg

    @property
    def scheme(self) -> str:
        """Weights, and what of the options changes the numbers."""
        cache = [f"{self.options.kv_dtype} KV"] if self.options.kv_dtype != "auto" else []
        seats = [f"{self.options.max_seqs} seats"] if self.options.max_seqs else []
        eager = [] if self.options.graphs else ["no graphs"]
        lookup = [f"lookup {self.options.lookup}"] if self.options.lookup else []
        return ", ".join([self.checkpoint.scheme(dtype_name(self.dtype)), *cache, *seats, *eager, *lookup])

    def setting(self, devices: Sequence[str] = ()) -> Setting:
        """With an engine on each of `devices`, where they are given."""
        count = f"{len(devices)} {'worker' if self.device.type == 'cpu' else 'GPU'}{'s' if len(devices) > 1 else ''}"
        scheme = f"{self.scheme}, {count}" if devices else self.scheme
        return machine.setting_for(self.device, self.name, scheme)

    def peer_setting(self, engine: str) -> Setting:
        """Of an engine that runs dequantized weights."""
        return machine.setting_for(self.device, self.name, dtype_name(self.dtype), engine)

    def runner(self) -> EngineRunner:
        """Loads the weights, with the seats and the cache that chat and batch would get."""
        plan = plan_engine(self.options, self.checkpoint, self.device, self.dtype)
        fitted = replace(self.checkpoint, cfg=self.cfg.with_context(plan.context))
        opened = open_engine(self.options, plan, fitted, self.device, self.dtype)
        return EngineRunner(opened.engine)

    @contextmanager
    def fleet_runner(self, devices: Sequence[str], settings: Settings) -> Iterator[FleetRunner]:
        """Loads the weights once for each device, in processes of their own, which end with the context."""
        with self.on_disk() as model:
            files = resolve(model, settings)
            prompter = Prompter.open(self.options, files)
            start = starter(devices, self.options, files, settings.threads, settings.cache_dir)
            links = [start(number) for number in range(len(devices))]
            with closing(Fleet(prompter, links, _refuse)) as fleet:
                if (found := fleet.gather()) < len(devices):
                    _refuse(f"{len(devices) - found} of {len(devices)} workers could not load the model")
                yield FleetRunner(fleet)

    def peer_runner(self) -> peer.TransformersRunner:
        """Loads the same model in transformers."""
        if isinstance(self.checkpoint, RandomCheckpoint):
            return peer.TransformersRunner(peer.random_peer(raw_config(self.name), self.device, self.dtype))
        return peer.TransformersRunner(peer.load_peer(self.checkpoint.path, self.device, self.dtype))

    @contextmanager
    def on_disk(self) -> Iterator[str]:
        """What -m takes: the model itself, or a folder that lasts as long as the context."""
        if isinstance(self.checkpoint, Checkpoint):
            yield self.name
            return
        with TemporaryDirectory(prefix="minicpm-bench-") as folder:
            write_folder(Path(folder), self.name, self.device)
            yield folder


def _refuse(text: str) -> None:
    """Of a fleet: with fewer workers than were asked for it would be another measurement."""
    raise DeviceError(f"{text}; not measured")


def open_subject(load: LoadOptions, shape: str | None, settings: Settings) -> Subject:
    """The shape, or the model that `load` names, fetched if it is not here; no weights are read.

    From here on torch takes as many threads as `settings` say.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = choose_device(load.device)
    dtype = choose_dtype(load.dtype, device)
    kernels = settings.cache_dir / KERNELS
    if shape is not None:
        return Subject(shape, RandomCheckpoint.of(shape, load, kernels), load, device, dtype)
    checkpoint = Checkpoint.read(resolve(load.model, settings).path).with_options(load)
    return Subject(load.model, replace(checkpoint, kernels=kernels), load, device, dtype)
