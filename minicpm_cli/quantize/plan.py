"""Memory, disk and time of a quantization, from the shapes alone. No torch here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.shapes import EMBED, HEAD, is_linear, tensor_shapes
from minicpm_cli.quantize.calibration import Amount
from minicpm_cli.quantize.layers import Group, block_shapes, check_layers, stages
from minicpm_cli.quantize.recipe import Recipe

# float32 copies of a Hessian that one solve holds: its sum, the mean, sorted, reversed, two factors, a unit matrix and
# the inverse; and copies of the group's weights: joined, transposed, rounded, wrong, their products.
HESSIAN_COPIES, WEIGHT_COPIES = 8, 6
WRITTEN_BYTES = 2  # of an element that stays plain
LOGIT_BYTES = 3 * (64 << 20)  # of held-out text, a few rows at a time
SLACK = 1.05  # what allocators round up
INDEX_BYTES = 4  # of a row's column numbers (g_idx)


@dataclass(frozen=True, slots=True)
class Machine:
    """What the plan is for. `itemsize` of an activation; `rate` of products in operations a second (0: unknown)."""

    device: str
    itemsize: int
    chunk: int  # tokens that pass a block at once
    free: int
    host_free: int
    disk_free: int
    rate: float = 0.0

    @property
    def cpu(self) -> bool:
        return self.device == "cpu"


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes and seconds. `misfits` are layers that cannot be packed; `problem` is empty when everything fits."""

    machine: Machine
    weights: int  # of a block, twice: the tensors and the layers made of them
    hessians: int  # of the stage whose inputs are widest
    solving: int  # of the largest group
    activations: int
    ends: int  # embedding and head, at the end
    states: int  # hidden states between the blocks, on the host
    reading: int  # of a block's source tensors, on the host
    output: int
    bits_per_weight: float
    disk: int
    seconds: float
    tokens: int
    misfits: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """On the device."""
        gathering = self.weights + self.hessians + self.activations
        solving = self.weights // 2 + self.hessians + self.solving
        own = max(gathering, solving, self.ends)
        return int(SLACK * own) + (self.host if self.machine.cpu else 0)

    @property
    def host(self) -> int:
        return self.states + self.reading

    @property
    def problem(self) -> str:
        m = self.machine
        checks = (
            (self.peak, m.free, f"on {m.device}"),
            (self.host, m.host_free, "of host memory"),
            (self.disk, m.disk_free, "of disk"),
        )
        short = [(size(need), where, size(free)) for need, free, where in checks if need > free]
        return "; ".join(f"{need} {where} are needed, {free} are free" for need, where, free in short)

    def rows(self) -> list[tuple[str, str]]:
        """For people: where the memory goes."""
        where = "host" if self.machine.cpu else self.machine.device
        found = [
            (f"a block's weights, twice ({where})", size(self.weights)),
            (f"input statistics ({where})", size(self.hessians)),
            (f"solving the largest group ({where})", size(self.solving)),
            (f"activations ({where})", size(self.activations)),
            (f"embedding and head ({where})", size(self.ends)),
            ("hidden states (host)", size(self.states)),
            ("reading a block (host)", size(self.reading)),
            (f"peak ({where})", f"{size(self.peak)} of {size(self.machine.free)} free"),
        ]
        if not self.machine.cpu:
            found.append(("peak (host)", f"{size(self.host)} of {size(self.machine.host_free)} free"))
        found.append(("disk", f"{size(self.disk)} of {size(self.machine.disk_free)} free"))
        found.append(("output", f"{size(self.output)}, {self.bits_per_weight:.2f} bits a weight"))
        found.append(("calibration", f"{self.tokens} tokens"))
        if self.machine.rate:
            found.append(("time", f"about {duration(self.seconds)}"))
        return found

    def record(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self) | {"peak": self.peak, "host": self.host, "problem": self.problem}


def make_plan(cfg: ModelConfig, recipe: Recipe, calibration: Amount, held: int, machine: Machine) -> Plan:
    """`held` are the tokens of held-out text. Raises UsageError for a pattern of --skip that names nothing."""
    tokens = calibration.tokens if recipe.calibrates else 0
    block = stages(cfg, 0, recipe)
    elements = _elements(block_shapes(cfg, 0).values())
    weights = 2 * elements * machine.itemsize
    output, bits = output_bytes(cfg, recipe)
    hidden = cfg.hidden_size * machine.itemsize
    return Plan(
        machine=machine,
        weights=weights,
        hessians=max((4 * sum(g.columns**2 for g in s.groups) for s in block), default=0) if tokens else 0,
        solving=max((_solving(g, gptq=bool(tokens)) for s in block for g in s.groups), default=0),
        activations=_activations(cfg, machine, machine.chunk, gptq=bool(tokens)),
        ends=_ends(cfg, machine) + LOGIT_BYTES,
        states=(tokens + 2 * held) * hidden,
        reading=elements * WRITTEN_BYTES + (output // (cfg.layers + 1)),
        output=output,
        bits_per_weight=bits,
        disk=2 * output,
        seconds=_operations(cfg, recipe, tokens, tokens + 2 * held) / machine.rate if machine.rate else 0.0,
        tokens=tokens,
        misfits=tuple(check_layers(cfg, recipe)),
    )


def output_bytes(cfg: ModelConfig, recipe: Recipe) -> tuple[int, float]:
    """Of the written tensors, and their bits a weight of the model."""
    scheme, bits = recipe.scheme, 0.0
    for name, shape in tensor_shapes(cfg).items():
        count = math.prod(shape)
        if is_linear(name) and not recipe.skips(name.removesuffix(".weight")):
            index = 8 * INDEX_BYTES * shape[1] if scheme.kind == "int" else 0
            bits += count * scheme.bits_per_weight(shape[1]) + index
        elif name == HEAD and recipe.head_bits == 8:
            bits += count * recipe.head_scheme.bits_per_weight(shape[1]) + 8 * INDEX_BYTES * shape[1]
        else:
            bits += count * 8 * WRITTEN_BYTES
    return math.ceil(bits / 8), bits / cfg.parameters


def _elements(shapes: Any) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _solving(group: Group, *, gptq: bool) -> int:
    """Beyond the statistics themselves, which are counted with their stage."""
    weights = sum(layer.weights for layer in group.layers)
    copies = (HESSIAN_COPIES - 1) * group.columns**2 if gptq else 0
    return 4 * (copies + WEIGHT_COPIES * weights)


def _activations(cfg: ModelConfig, machine: Machine, tokens: int, *, gptq: bool) -> int:
    """Of a chunk of tokens in the wider half of a block."""
    heads = cfg.heads + 2 * cfg.kv_heads
    qkv = heads * cfg.head_dim if cfg.mla is None else cfg.heads * (cfg.mla.latent + cfg.head_dim)
    attention = machine.itemsize * (4 * cfg.hidden_size + 2 * qkv) + 4 * 3 * qkv  # rotation is done in float32
    mlp = machine.itemsize * (4 * cfg.hidden_size + 3 * cfg.intermediate)
    widest = max(cfg.intermediate, cfg.hidden_size) if gptq and machine.itemsize < 4 else 0
    return tokens * (max(attention, mlp) + 4 * widest)


def _ends(cfg: ModelConfig, machine: Machine) -> int:
    shapes = tensor_shapes(cfg)
    return machine.itemsize * _elements(shape for name, shape in shapes.items() if name in (EMBED, HEAD))


def _operations(cfg: ModelConfig, recipe: Recipe, calibration: int, passing: int) -> float:
    """Multiplications and additions: the passes, the statistics and the solves of all blocks."""
    block = _elements(block_shapes(cfg, 0).values())
    if cfg.moe:
        block = block * cfg.moe.active // cfg.moe.experts
    work = 2.0 * passing * block
    if calibration:
        groups = [group for stage in stages(cfg, 0, recipe) for group in stage.groups]
        seen = [calibration * (cfg.moe.active / cfg.moe.experts if cfg.moe and g.expert else 1.0) for g in groups]
        work += 2.0 * calibration * block * LOOKS
        work += sum(1.25 * t * g.columns**2 for t, g in zip(seen, groups, strict=True))
        work += sum(_solve_operations(g) for g in groups)
    return cfg.layers * work


LOOKS = 0.7  # passes for the statistics' sake, as a part of a whole pass


def _solve_operations(group: Group) -> float:
    rows, columns = sum(layer.rows for layer in group.layers), group.columns
    return 1.5 * columns**3 + 6.0 * rows * columns**2 + SEARCH * rows * columns


SEARCH = 4000.0  # operations' worth of time that a weight's grid and rounding take


def size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


Rate = Callable[[], float]
