"""Memory, disk and time of a quantization, from the shapes alone. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from minicpm_cli.engine.memory_workspace import SCORE_COPIES
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.load_scheme import LoadScheme, weight_bytes
from minicpm_cli.model.shapes import HEAD, Shape, is_linear, tensor_shapes
from minicpm_cli.quantize.calibration import SELF, Amount
from minicpm_cli.quantize.layers import Group, block_shapes, check_layers, stages
from minicpm_cli.quantize.recipe import Recipe
from minicpm_cli.quantize.seating import SAMPLED_BYTES, Seating, sampled_in
from minicpm_cli.units import duration, size

# float32 copies of a Hessian that one solve holds: its sum, the mean, sorted, reversed, two factors, a unit matrix and
# the inverse; and copies of the group's weights: joined, transposed, rounded, wrong, their products.
HESSIAN_COPIES, WEIGHT_COPIES = 8, 6
LAPACK_COPIES = 2  # of a Hessian, on a CPU: LAPACK gets its matrix and its right side by columns
WRITTEN_BYTES, WIDE_BYTES = 2, 4  # of an element that stays plain, and of one that was wider or packed before
LOGIT_BYTES = 7 * (64 << 20)  # of held-out text, a few rows at a time: scores and probabilities of both models
UNPACKED_BYTES = 12  # a weight of the layer whose product is being computed from packed weights
SLACK = 1.1  # what allocators round up
INDEX_BYTES = 4  # of a column number (g_idx)
LOOKS = 0.7  # passes for the statistics' sake, as a part of a whole pass
# Operations' worth of time, by a profile of a block of the 2B on one thread: of a weight's grid and rounding, which are
# element by element; of a Hessian's factors and inverse, by the cube of its size, LAPACK being slower than products; of
# a weight, by each of its inputs, for rounding with what is left to make up for and for the errors.
SEARCH, FACTORS, PRODUCTS, AIMS = 16000.0, 5.0, 5.0, 4.0
CUDA_COLUMN, CUDA_STEP = 3e-4, 8e-4  # seconds that launches take: of a column in a solve, of a layer in a decode step


# Up to so many bytes of a layer's inputs are kept on a CPU: it saves 1.0 s of 6.0 s a block of the demo on one thread.
LARGEST_KEPT = 512 << 20

LABELS = MappingProxyType(
    {
        "block": "a block's weights",
        "original": "the original block beside it",
        "statistics": "statistics of its inputs",
        "solving": "solving its largest layers",
        "activations": "its activations",
        "head": "the head, when measuring",
        "kept": "inputs of its last layers",
        "states": "states between blocks (host)",
        "reading": "reading a block (host)",
        "embedding": "the embedding (host)",
        "sampling": "the model writing its samples",
    }
)


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
class Phase:
    """Bytes that a part of the work takes on the device and on the host (which are one on a CPU)."""

    name: str
    device: int
    host: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes and seconds. `parts` says what the bytes are for; `misfits` are layers that cannot be packed."""

    machine: Machine
    parts: dict[str, int]
    phases: tuple[Phase, ...]
    output: int
    bits_per_weight: float
    disk: int
    seconds: float
    tokens: int
    misfits: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """On the device."""
        own = max(phase.device + (phase.host if self.machine.cpu else 0) for phase in self.phases)
        return int(SLACK * own)

    @property
    def host(self) -> int:
        return int(SLACK * max(phase.host for phase in self.phases))

    @property
    def problem(self) -> str:
        """What does not fit; empty when everything does."""
        m = self.machine
        checks = [(self.peak, m.free, f"of memory on {m.device}"), (self.disk, m.disk_free, "of disk")]
        if not m.cpu:
            checks.append((self.host, m.host_free, "of host memory"))
        short = [(size(need), where, size(free)) for need, free, where in checks if need > free]
        return "; ".join(f"{need} {where} are needed, {free} are free" for need, where, free in short)

    def rows(self) -> list[tuple[str, str]]:
        """For people: where the memory goes."""
        m = self.machine
        found = [(LABELS[name], size(count)) for name, count in self.parts.items() if count]
        found.append((f"peak on {m.device}", f"{size(self.peak)} of {size(m.free)} free"))
        if not m.cpu:
            found.append(("peak on the host", f"{size(self.host)} of {size(m.host_free)} free"))
        found.append(("disk", f"{size(self.disk)} of {size(m.disk_free)} free"))
        found.append(("output", f"{size(self.output)}, {self.bits_per_weight:.2f} bits a weight"))
        found.append(("calibration", f"{self.tokens} tokens" if self.tokens else "none"))
        if m.rate:
            found.append(("time", f"about {duration(self.seconds)}"))
        return found

    def record(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self) | {"peak": self.peak, "host": self.host, "problem": self.problem}


def make_plan(
    cfg: ModelConfig, recipe: Recipe, calibration: Amount, held: int, machine: Machine, *, wide: bool = False
) -> Plan:
    """`held` are the tokens of held-out text; `wide`: the source's plain tensors are not as they will be written.

    Raises UsageError for a pattern of --skip that names nothing.
    """
    misfits = tuple(check_layers(cfg, recipe))
    tokens = calibration.tokens if recipe.calibrates else 0
    parts = _parts(cfg, recipe, tokens, held, machine, wide=wide)
    parts["sampling"] = _sampling(cfg, calibration) if tokens and recipe.calib == SELF else 0
    output, bits = output_bytes(cfg, recipe)
    return Plan(
        machine=machine,
        parts=parts,
        phases=_phases(parts),
        output=output,
        bits_per_weight=bits,
        disk=2 * output,
        seconds=_seconds(cfg, recipe, calibration, held, machine),
        tokens=tokens,
        misfits=misfits,
    )


def _parts(cfg: ModelConfig, recipe: Recipe, tokens: int, held: int, machine: Machine, *, wide: bool) -> dict[str, int]:
    todo = [stage for index in range(cfg.layers) for stage in stages(cfg, index, recipe)]  # each may skip others
    elements = _elements(block_shapes(cfg, 0).values())
    ends = cfg.vocab * cfg.hidden_size
    outer = ends * (1 if cfg.tie else 2)
    return {
        "block": elements * machine.itemsize,  # the tensors; the layers made of them are as many again
        "original": elements * machine.itemsize if recipe.corrects else 0,
        "statistics": max(sum(_statistics(g, recipe) for g in s.groups) for s in todo) if tokens else 0,
        "solving": max(_solving(g, recipe, machine) for s in todo for g in s.groups),
        "activations": _activations(cfg, machine, recipe),
        "head": machine.itemsize * ends * (2 if wide else 1) + LOGIT_BYTES,
        "kept": _kept(cfg, recipe, tokens, machine),
        "states": ((2 if recipe.corrects else 1) * tokens + 2 * held) * cfg.hidden_size * machine.itemsize,
        "reading": elements * (WIDE_BYTES if wide else WRITTEN_BYTES),
        "embedding": outer * (WRITTEN_BYTES + (WIDE_BYTES if wide else 0)),
    }


def _phases(parts: dict[str, int]) -> tuple[Phase, ...]:
    gathering = 2 * parts["block"] + parts["original"] + parts["statistics"] + parts["activations"]
    solving = parts["block"] + parts["original"] + parts["statistics"] + parts["solving"]
    kept = parts["states"] + parts["embedding"] + parts["kept"]
    return (
        Phase("sampling", parts["sampling"], parts["embedding"]),
        Phase("quantizing", max(gathering, solving), kept + parts["reading"]),
        Phase("measuring", parts["head"], kept),
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


def kept_bytes(tokens: int, columns: int, itemsize: int) -> int:
    """Of a layer's inputs on a CPU; 0 where they are too many to keep."""
    needed = tokens * columns * itemsize
    return needed if needed <= LARGEST_KEPT else 0


def _elements(shapes: Iterable[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _statistics(group: Group, recipe: Recipe) -> int:
    """The Hessian; where weights are corrected what the original inputs or outputs have to do with the inputs."""
    aim = 0
    if recipe.corrects:
        aim = group.layers[0].weights if group.adds else group.columns**2
    return 4 * (group.columns**2 + aim)


def _kept(cfg: ModelConfig, recipe: Recipe, tokens: int, machine: Machine) -> int:
    """What the widest layer reads that adds to the residual stream, from its statistics to the end of its half."""
    groups = [g for stage in stages(cfg, 0, recipe) for g in stage.groups if g.adds and not g.expert]
    sizes = [kept_bytes(tokens, group.columns, machine.itemsize) for group in groups]
    return max(sizes, default=0) if machine.cpu else 0


def _solving(group: Group, recipe: Recipe, machine: Machine) -> int:
    """Beyond the statistics themselves, which are counted with their stage."""
    hessians = HESSIAN_COPIES - 1 + (LAPACK_COPIES if machine.cpu else 0)
    copies = hessians * group.columns**2 if recipe.calibrates else 0
    return 4 * (copies + (WEIGHT_COPIES + recipe.corrects) * _weights(group))


def _activations(cfg: ModelConfig, machine: Machine, recipe: Recipe) -> int:
    """Of a chunk of tokens in the wider half of a block, with the float32 copies that are counted in."""
    qkv = (cfg.heads + 2 * cfg.kv_heads) * cfg.head_dim
    if cfg.mla:
        qkv = cfg.heads * (2 * cfg.mla.latent + cfg.head_dim)  # queries and their outputs in the latent's size
    attention = machine.itemsize * (4 * cfg.hidden_size + 2 * qkv) + 4 * 3 * qkv  # rotation is done in float32
    mlp = machine.itemsize * (4 * cfg.hidden_size + 3 * cfg.intermediate)
    narrow = machine.itemsize < 4
    copies = 4 if recipe.calibrates and narrow else 0
    if recipe.corrects:  # the original's input and, in float32, the difference; states of both streams
        copies += machine.itemsize + (8 if narrow else 4)
        mlp += 4 * machine.itemsize * cfg.hidden_size
    return machine.chunk * (max(attention, mlp) + copies * max(cfg.intermediate, cfg.hidden_size))


def _sampling(cfg: ModelConfig, calibration: Amount) -> int:
    """The model as it writes its own samples, with its cache."""
    scheme = LoadScheme.of(sampled_in(cfg), 16)
    weights = weight_bytes(cfg, SAMPLED_BYTES, scheme.matrix)
    seating = Seating.of(cfg, SAMPLED_BYTES, calibration)
    widest = max(
        sum(layer.weights for layer in group.layers) for stage in stages(cfg, 0, Recipe()) for group in stage.groups
    )
    unpacked = UNPACKED_BYTES * widest if scheme.linear else 0
    logits = seating.seats * cfg.vocab * 4 * SCORE_COPIES
    return weights + seating.tokens * cfg.kv_bytes_per_token(SAMPLED_BYTES) + unpacked + logits


def _seconds(cfg: ModelConfig, recipe: Recipe, calibration: Amount, held: int, machine: Machine) -> float:
    """Products at the measured rate, and on a GPU the launches that outweigh them."""
    if not machine.rate:
        return 0.0
    tokens = calibration.tokens if recipe.calibrates else 0
    heads = 2 * 2.0 * held * cfg.vocab * cfg.hidden_size  # of the quantized model and of the original
    seconds = (heads + _operations(cfg, recipe, tokens, tokens + 2 * held)) / machine.rate
    if not machine.cpu and tokens:
        columns = sum(group.columns for stage in stages(cfg, 0, recipe) for group in stage.groups)
        seconds += cfg.layers * columns * CUDA_COLUMN
    if tokens and recipe.calib == SELF:
        seating = Seating.of(cfg, SAMPLED_BYTES, calibration)
        steps = tokens / seating.seats
        seconds += 2.0 * tokens * cfg.parameters / machine.rate
        seconds += 0.0 if machine.cpu else steps * cfg.layers * CUDA_STEP
    return seconds


def _operations(cfg: ModelConfig, recipe: Recipe, calibration: int, passing: int) -> float:
    """Multiplications and additions: the passes, the statistics and the solves of all blocks."""
    block = _elements(block_shapes(cfg, 0).values())
    share = cfg.moe.active / cfg.moe.experts if cfg.moe else 1.0
    work = 2.0 * (passing + LOOKS * calibration) * block * share
    groups = [group for stage in stages(cfg, 0, recipe) for group in stage.groups]
    if calibration:
        for group in groups:
            moved = _statistics(group, recipe) - 4 * group.columns**2
            work += calibration * (share if group.expert else 1.0) * (1.25 * group.columns**2 + 0.5 * moved)
        work += 2.0 * calibration * block * share if recipe.corrects else 0.0
        products = PRODUCTS + (AIMS if recipe.corrects else 0.0)
        work += sum(FACTORS * g.columns**3 + products * g.columns * _weights(g) for g in groups)
    return cfg.layers * (work + SEARCH * sum(_weights(g) for g in groups))


def _weights(group: Group) -> int:
    return sum(layer.weights for layer in group.layers)
