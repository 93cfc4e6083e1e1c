"""What a checkpoint, loaded as asked, needs of a device's memory; `plan` and the engine count the same. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from minicpm_cli.engine.memory import Demand, MemoryOptions
from minicpm_cli.engine.memory_workspace import Form
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.kv_format import KVFormat
from minicpm_cli.model.load_scheme import weight_bytes
from minicpm_cli.settings import LoadOptions

KERNELS = 256 << 20  # bytes that a driver takes for kernels and graphs after the context: 96 MB for cuBLAS's alone
PACKED_SHARE = 0.9  # of the plain weights' bytes: models below have packed matrices in their blocks, not only a head
# Tokens in chat. demo on 2 cores: 2.1 times the speed where it copies, nothing lost where it does not.
CPU_LOOKUP = 8
ELEMENT_BYTES: Mapping[str, int] = MappingProxyType({"bf16": 2, "fp16": 2, "fp32": 4})


class Sized(Protocol):
    """What is needed of a Checkpoint."""

    @property
    def cfg(self) -> ModelConfig: ...

    def weight_bytes(self, itemsize: int, *, cpu: bool = False) -> int: ...


def demand_of(checkpoint: Sized, options: LoadOptions, dtype: str, *, cpu: bool) -> Demand:
    """`dtype` is bf16, fp16 or fp32, as it was chosen for the device."""
    cfg, itemsize = checkpoint.cfg, ELEMENT_BYTES[dtype]
    weights = checkpoint.weight_bytes(itemsize, cpu=cpu)
    packed = weights < PACKED_SHARE * weight_bytes(cfg, itemsize, lambda name, k: None)
    kv_token = KVFormat.of(options.kv_dtype, dtype).bytes_per_token(cfg)
    return Demand(cfg, weights, kv_token, Form(itemsize, packed, rounded=options.quantize is not None, cpu=cpu))


def wanted(options: LoadOptions, *, cpu: bool, fixed: int = 0) -> MemoryOptions:
    """`fixed`: what the device's context will take, where it is not there yet."""
    return MemoryOptions(
        context=options.ctx,
        max_seqs=options.max_seqs,
        max_batch_tokens=options.max_batch_tokens,
        fraction=options.memory_fraction,
        cpu=cpu,
        graphs=options.graphs and not cpu,
        fixed=0 if cpu else fixed + KERNELS,
        lookup=lookup_of(options, cpu=cpu),
    )


def lookup_of(options: LoadOptions, *, cpu: bool) -> int:
    """Tokens that a sequence may have verified in a step.

    None on a GPU, whatever `options` say: the rows of a draft are rows of a decode step, and its attention reads the
    tokens before a row's own without waiting for the other rows to store theirs.
    """
    if not cpu:
        return 0
    return CPU_LOOKUP if options.lookup is None else options.lookup
