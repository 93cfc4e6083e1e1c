"""From a checkpoint to an engine that is sized by the memory that is free: chat, batch and bench run on the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from minicpm_cli.engine.engine import Engine, EngineConfig
from minicpm_cli.engine.memory import MemoryPlan, plan_memory
from minicpm_cli.engine.memory_ledger import Kind, shape_of
from minicpm_cli.errors import OutOfMemory
from minicpm_cli.llm.demand import Sized, demand_of, lookup_of, wanted
from minicpm_cli.llm.device import check_cache, device_name, dtype_name, free_bytes
from minicpm_cli.llm.watch import Watch, versions
from minicpm_cli.model.decoder import Decoder
from minicpm_cli.model.kv import KVCache
from minicpm_cli.model.kv_format import KVFormat
from minicpm_cli.settings import LoadOptions


class Loadable(Sized, Protocol):
    """What is needed of a Checkpoint."""

    def scheme(self, plain: str) -> str: ...

    def decoder(
        self, device: torch.device, dtype: torch.dtype, on_progress: Callable[[int, int], None] | None = None
    ) -> Decoder: ...


@dataclass(frozen=True, slots=True)
class Opened:
    engine: Engine
    decoder: Decoder
    kv: KVCache
    watch: Watch


def plan_engine(options: LoadOptions, checkpoint: Loadable, device: torch.device, dtype: torch.dtype) -> MemoryPlan:
    """Before anything is loaded. Raises OutOfMemory for what does not fit, DeviceError for what the GPU cannot do."""
    check_cache(options.kv_dtype, device)
    cpu = device.type == "cpu"
    demand = demand_of(checkpoint, options, dtype_name(dtype), cpu=cpu)
    return plan_memory(demand, free_bytes(device), wanted(options, demand.form))


def open_engine(
    options: LoadOptions,
    plan: MemoryPlan,
    checkpoint: Loadable,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Callable[[int, int], None] | None = None,
    ledger: Path | None = None,
) -> Opened:
    """Loads the weights, whose rotation tables are as long as the checkpoint's cfg says, and allocates the cache.

    `options` are those that were planned for; `ledger` is the folder where the measured memory is kept.
    """
    kv_format = KVFormat.of(options.kv_dtype, dtype_name(dtype))
    scheme = checkpoint.scheme(dtype_name(dtype))
    kind = Kind(shape_of(checkpoint.cfg), scheme, kv_format.name, device_name(device), versions())
    watch = Watch(plan, checkpoint.cfg, kind, device, ledger)
    with _memory_errors(device):
        with watch.during("load"):
            decoder = checkpoint.decoder(device, dtype, on_progress)
        kv = KVCache.allocate(decoder.cfg, plan.pages, plan.page_size, device, dtype, kv_format)
    assert kv.nbytes == plan.cache, (kv.nbytes, plan.cache)
    engine = Engine(decoder, kv, _engine_config(plan, options))
    engine.memory = watch
    return Opened(engine, decoder, kv, watch)


def _engine_config(plan: MemoryPlan, options: LoadOptions) -> EngineConfig:
    return EngineConfig(
        pages=plan.pages,
        max_seqs=plan.max_seqs,
        max_batch_tokens=plan.max_batch_tokens,
        context=plan.context,
        page_size=plan.page_size,
        graphs=options.graphs,
        lookup=lookup_of(options, plan.form),
    )


@contextmanager
def _memory_errors(device: torch.device) -> Iterator[None]:
    """Turns torch's out-of-memory into ours."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "can't allocate memory" not in str(error):
            raise
        raise OutOfMemory(
            f"loading ran out of memory on {device}. Lower --ctx or --max-seqs, close other programs, "
            "or take a smaller model."
        ) from error
