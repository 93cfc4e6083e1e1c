"""Which matrices of a block are quantized, in what order, and which of them read the same input. No torch here.

A stage's inputs come from the layers of the stages before it, already quantized (true-sequential, as in GPTQ's code).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from minicpm_cli.errors import UsageError
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.shapes import HEAD, Shape, is_linear, tensor_shapes
from minicpm_cli.quantize.recipe import Recipe
from quant.scheme import Scheme, groups_for

Half = Literal["attention", "mlp"]
SHOWN = 12
HEAD_NAME = HEAD.removesuffix(".weight")


@dataclass(frozen=True, slots=True)
class Layer:
    """One matrix [rows, columns]; `name` is its tensor's name without ".weight"."""

    name: str
    rows: int
    columns: int

    @property
    def tensor(self) -> str:
        return f"{self.name}.weight"

    @property
    def weights(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that read one input; `tap` says where in the block it passes (see `block.Probe`)."""

    tap: str
    layers: tuple[Layer, ...]

    @property
    def columns(self) -> int:
        return self.layers[0].columns

    @property
    def expert(self) -> bool:
        """Whether only the tokens that a router sends there pass."""
        return ".experts." in self.tap

    @property
    def adds(self) -> bool:
        """Whether its output goes into the residual stream."""
        return self.tap.endswith((".out", ".down")) and self.tap != "attention.down"


@dataclass(frozen=True, slots=True)
class Stage:
    """Groups whose inputs are gathered in one pass over the calibration tokens."""

    half: Half
    groups: tuple[Group, ...]

    @property
    def adds(self) -> bool:
        """Whether it is the last of its half, whose outputs go into the residual stream."""
        return self.groups[0].adds


def block_prefix(index: int) -> str:
    return f"model.layers.{index}."


def block_shapes(cfg: ModelConfig, index: int) -> dict[str, Shape]:
    """Every tensor of block `index` by name."""
    prefix = block_prefix(index)
    return {name: shape for name, shape in tensor_shapes(cfg).items() if name.startswith(prefix)}


def outer_names(cfg: ModelConfig) -> list[str]:
    """The tensors outside the blocks: embedding, last norm, and a head of its own."""
    return [name for name in tensor_shapes(cfg) if not name.startswith("model.layers.")]


def linear_layers(cfg: ModelConfig) -> list[Layer]:
    """All matrices of all blocks that a quantizer packs."""
    return [_layer(name, shape) for name, shape in tensor_shapes(cfg).items() if is_linear(name)]


def _layer(tensor: str, shape: Shape) -> Layer:
    return Layer(tensor.removesuffix(".weight"), *shape)


def stages(cfg: ModelConfig, index: int, recipe: Recipe) -> list[Stage]:
    """The stages of block `index` without what `recipe` skips."""
    layers = {n.removesuffix(".weight"): _layer(n, s) for n, s in block_shapes(cfg, index).items() if is_linear(n)}
    found = []
    for half, groups in _layout(cfg):
        kept = tuple(_group(layers, block_prefix(index), tap, names, recipe) for tap, names in groups)
        if any(group.layers for group in kept):
            found.append(Stage(half, tuple(group for group in kept if group.layers)))
    return found


def _group(layers: dict[str, Layer], prefix: str, tap: str, names: tuple[str, ...], recipe: Recipe) -> Group:
    return Group(tap, tuple(layers[prefix + name] for name in names if not recipe.skips(prefix + name)))


def _layout(cfg: ModelConfig) -> Iterator[tuple[Half, list[tuple[str, tuple[str, ...]]]]]:
    a = "self_attn."
    if cfg.mla:
        yield "attention", [("attention.down", (f"{a}q_a_proj", f"{a}kv_a_proj_with_mqa"))]
        yield "attention", [("attention.q_up", (f"{a}q_b_proj",)), ("attention.latent", (f"{a}kv_b_proj",))]
    else:
        yield "attention", [("attention.qkv", (f"{a}q_proj", f"{a}k_proj", f"{a}v_proj"))]
    yield "attention", [("attention.out", (f"{a}o_proj",))]
    if not cfg.moe:
        yield "mlp", [("mlp.gate_up", ("mlp.gate_proj", "mlp.up_proj"))]
        yield "mlp", [("mlp.down", ("mlp.down_proj",))]
        return
    experts = [f"mlp.experts.{e}" for e in range(cfg.moe.experts)]
    yield "mlp", [(f"{e}.gate_up", (f"{e}.w1", f"{e}.w3")) for e in experts]
    yield "mlp", [(f"{e}.down", (f"{e}.w2",)) for e in experts]


def head_layer(cfg: ModelConfig) -> Layer:
    return Layer(HEAD_NAME, cfg.vocab, cfg.hidden_size)


def packs(scheme: Scheme, layer: Layer) -> bool:
    """Whether the rows fall into whole groups, and codes and zero points into whole 32-bit words of the file."""
    return scheme.divides(layer.columns) and (scheme.kind != "int" or layer.rows * scheme.bits % 32 == 0)


def check_layers(cfg: ModelConfig, recipe: Recipe) -> list[str]:
    """A line for every size of layer that the recipe cannot pack, a head of its own among them.

    Raises UsageError for patterns that name no layer.
    """
    layers = linear_layers(cfg)
    if unmatched := recipe.unmatched(layer.name for layer in layers):
        raise UsageError(
            f"--skip {unmatched[0]} names no layer; names are such as {layers[0].name}, patterns such as '*.down_proj'"
        )
    wanted = [layer for layer in layers if not recipe.skips(layer.name)]
    if not wanted:
        raise UsageError("--skip leaves nothing to quantize")
    misfits: dict[tuple[str, int, int], list[Layer]] = {}
    for layer in wanted:
        if not packs(recipe.scheme, layer):
            misfits.setdefault((layer.name.rsplit(".", 1)[1], layer.rows, layer.columns), []).append(layer)
    lines = [_misfit(recipe.scheme, kind, len(found)) for kind, found in misfits.items()]
    head = None if cfg.tie else misfit_of_head(cfg, recipe)
    return [*lines, head] if head else lines


def misfit_of_head(cfg: ModelConfig, recipe: Recipe) -> str | None:
    """Why a head that is to be quantized cannot be packed: many vocabularies are of an odd size."""
    layer = head_layer(cfg)
    if recipe.head_bits == 16 or packs(recipe.head_scheme, layer):
        return None
    return _misfit(recipe.head_scheme, (layer.name, layer.rows, layer.columns), 1)


def refuse_misfits(lines: list[str]) -> None:
    """Raises UsageError that lists them."""
    if lines:
        more = f"\n  and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        raise UsageError("some layers cannot be packed so:\n  " + "\n  ".join(lines[:SHOWN]) + more)


def _misfit(scheme: Scheme, kind: tuple[str, int, int], count: int) -> str:
    name, rows, columns = kind
    head = f"{name} {rows}x{columns} ({count} layer{'s' if count > 1 else ''})"
    without = "--head-bits 16 leaves it as it is" if name == HEAD_NAME else f"leave it out with --skip '*.{name}'"
    if scheme.divides(columns):
        return f"{head}: its {rows} rows do not fill whole 32-bit words; {without}"
    allowed = [str(g) for g in groups_for(columns)] if scheme.kind == "int" else []
    if not allowed:
        return f"{head}: {columns} inputs do not divide into groups; {without}"
    width = "64" if scheme.kind == "nf4" else str(scheme.group)
    return f"{head}: {columns} inputs do not divide by {width}; --group-size {', '.join(allowed)} would, or {without}"
