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
# Tokens in chat. demo on 2 cores: 2.1 times the speed where it copies, nothing lost where it does not. MiniCPM-2B's
# shape in bf16 on an H200: 3 times where it goes in circles, nothing lost elsewhere; a row for each token and one for
# the last known one are the eight that the kernel for few rows takes. Packed weights were not timed there.
CPU_LOOKUP, GPU_LOOKUP = 8, 7
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
    rounded, merged = options.quantize is not None, options.lora is not None
    return Demand(cfg, weights, kv_token, Form(itemsize, packed, rounded=rounded, merged=merged, cpu=cpu))


def wanted(options: LoadOptions, form: Form, fixed: int = 0) -> MemoryOptions:
    """For weights of this `form`. `fixed`: what the device's context will take, where it is not there yet."""
    return MemoryOptions(
        context=options.ctx,
        max_seqs=options.max_seqs,
        max_batch_tokens=options.max_batch_tokens,
        fraction=options.memory_fraction,
        cpu=form.cpu,
        graphs=options.graphs and not form.cpu,
        fixed=0 if form.cpu else fixed + KERNELS,
        lookup=lookup_of(options, form),
    )


def lookup_of(options: LoadOptions, form: Form) -> int:
    """Tokens that a sequence may have verified in a step."""
    if options.lookup is not None:
        return options.lookup
    return CPU_LOOKUP if form.cpu else 0 if form.packed else GPU_LOOKUP
