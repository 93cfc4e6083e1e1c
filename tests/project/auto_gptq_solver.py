"""auto-gptq's own solver, block by block over a Llama folder as its package drives it: the number to be better than."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "interop"))

# Linears that see one input, in the order in which it quantizes them (true_sequential).
STAGES = (
    ("self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"),
    ("self_attn.o_proj",),
    ("mlp.up_proj", "mlp.gate_proj"),
    ("mlp.down_proj",),
)
DAMP = 0.01  # its default, as is min/max without a search


class _Stop(Exception):
    """The first block's input is known."""


def solve(plain: Path, out: Path, rows: Tensor, bits: int, group: int, *, symmetric: bool, act_order: bool) -> float:
    """Writes the model with the weights that the codes stand for, in float32; returns the seconds it took.

    `rows` [R, S] are the calibration tokens. Its scales are not rounded to float16, as packing would.
    """
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    begun = time.monotonic()
    with torch.inference_mode():
        hidden, more = _first_input(model, rows)
        for block in model.model.layers:
            for names in STAGES:
                _solve_stage([block.get_submodule(name) for name in names], block, hidden, more, {
                    "bits": bits, "group": group, "symmetric": symmetric, "act_order": act_order
                })  # fmt: skip
            hidden = _output(block, hidden, more)
    seconds = time.monotonic() - begun
    model.save_pretrained(out)
    for file in plain.glob("tokenizer*"):
        shutil.copy(file, out)
    return seconds


def _first_input(model: Any, rows: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """What the first block is called with."""
    found: list[tuple[Tensor, dict[str, Any]]] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...], more: dict[str, Any]) -> None:
        found.append((args[0], more))
        raise _Stop

    hook = model.model.layers[0].register_forward_pre_hook(keep, with_kwargs=True)
    try:
        model(rows, use_cache=False)
    except _Stop:
        return found[0]
    finally:
        hook.remove()
    raise AssertionError("the first block was never called")


def _solve_stage(linears: list[nn.Module], block: nn.Module, hidden: Tensor, more: Any, recipe: dict[str, Any]) -> None:
    from bare_package import bare_import

    solvers = [bare_import("auto_gptq.quantization.gptq").GPTQ(linear) for linear in linears]
    hooks = []
    for linear, solver in zip(linears, solvers, strict=True):
        solver.quantizer.configure(recipe["bits"], perchannel=True, sym=recipe["symmetric"], mse=False)
        hooks.append(linear.register_forward_hook(lambda _, x, y, solver=solver: solver.add_batch(x[0], y)))
    _output(block, hidden, more)
    for hook, solver in zip(hooks, solvers, strict=True):
        hook.remove()
        solver.fasterquant(percdamp=DAMP, group_size=recipe["group"], actorder=recipe["act_order"])
        solver.free()


def _output(block: nn.Module, hidden: Tensor, more: dict[str, Any]) -> Tensor:
    out = block(hidden, **more)
    return out[0] if isinstance(out, tuple) else out
