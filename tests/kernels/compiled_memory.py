"""Prints the shared memory of the attention kernels, compiled for a GPU that need not be there.

A process of its own, since Triton either interprets or compiles. Arguments: compute capability, then kernel:width:type.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from minicpm_cli.kernels import attention_decode, attention_decode_grouped, attention_prefill
from minicpm_cli.kernels.cache import LayerCache

TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def shared_memory(
    kernel: Any, constants: dict[str, object], kind: str, warps: int, stages: int, capability: int
) -> int:
    names = kernel.arg_names
    pointers = {"q": kind, "k": kind, "v": kind, "out": kind, "partials": "fp32", "stats": "fp32"}
    pointers |= dict.fromkeys(("table", "lengths", "q_start", "kv_len", "page_table"), "i32")
    types = {name: f"*{of}" for name, of in pointers.items()} | {"scale": "fp32", "scale_log2": "fp32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    whole = [["tt.divisibility", 16]]
    aligned = {(i,): whole for i, name in enumerate(names) if signature[name][0] == "*" or "stride" in name}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return int(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared)


def grouped(width: int, value: int, kind: str, capability: int) -> int:
    rows = torch.empty(2, 16, 1 if value < width else 4, width, dtype=TYPES[kind])
    keys = 1 if value < width else 2
    cache = LayerCache(rows.flatten(0, 1), rows[:, :, :keys], rows[:, :, -keys:, :value])
    history = attention_decode.History(cache, torch.zeros(1, 64), torch.ones(1), 16)
    t = attention_decode.grouped_tiling(1, history)
    first = 1 << (width.bit_length() - 1)
    constants = {
        "GROUP": 16, "ROWS": t.block, "KEYS": keys, "D1": first, "D2": width - first, "SHARED": value < width,
        "PAGE": 16, "SCALED": False, "STEP": t.step, "SPLITS": t.splits, "CHUNK": t.chunk, "HALF": 0, "PDL": False,
    } | dict.fromkeys(("k_scale", "v_scale", "cos", "sin"))  # fmt: skip
    return shared_memory(attention_decode_grouped.grouped, constants, kind, t.warps, t.stages, capability)


def prefill(width: int, value: int, kind: str, capability: int) -> int:
    """The more of pages in a row and pages anywhere."""
    return max(_prefill(width, value, kind, capability, run) for run in (False, True))


def _prefill(width: int, value: int, kind: str, capability: int, run: bool) -> int:
    t = attention_prefill.tile_for(width, TYPES[kind].itemsize, False, run)
    constants = {
        "PAGE": 16, "KEY_HEADS": 2, "G": 16, **attention_prefill.split(width, value, False)._asdict(),
        "SHARED": value < width, "RUN": run,
        "QUANTIZED": False, "PRECISION": "ieee" if kind == "fp32" else "tf32", "ROWS": t.rows, "KEYS": t.keys,
        "k_scale": None, "v_scale": None,
    }  # fmt: skip
    return shared_memory(attention_prefill._prefill.kernel, constants, kind, t.warps, t.stages, capability)


if __name__ == "__main__":
    for case in sys.argv[2:]:
        kernel, width, kind = case.split(":")
        wide = int(width)
        of = {"grouped": grouped, "prefill": prefill}[kernel]
        print(of(wide, 256 if wide == 288 else wide, kind, int(sys.argv[1])))
