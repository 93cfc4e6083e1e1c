"""What is quantized while a checkpoint is loaded: by rounding, matrix by matrix, and nothing is written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from minicpm_cli.errors import UsageError
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.shapes import HEAD, is_absorbed, is_linear, tensor_shapes
from quant.scheme import Scheme

# The largest that divides a row is taken.
GROUPS = (128, 64, 32)
HEAD_SCHEME = Scheme("int", 8)
SchemeOf = Callable[[str, int], Scheme | None]


@dataclass(frozen=True, slots=True)
class LoadScheme:
    """`linear`: the scheme of the blocks' matrices, None for as they come; `head`: whether the head becomes 8 bits."""

    linear: Scheme | None = None
    head: bool = False

    @classmethod
    def of(cls, quantize: str | None, head_bits: int) -> LoadScheme:
        """From the options' values. Embedding, norms, routers and what MLA absorbs are never quantized."""
        return cls(Scheme.named(quantize) if quantize else None, head_bits == 8)

    def matrix(self, name: str, k: int) -> Scheme | None:
        """How the matrix `name` of rows of `k` is quantized; None: not at all."""
        if name == HEAD:
            return fitted(HEAD_SCHEME, k) if self.head else None
        if self.linear is None or not is_linear(name) or is_absorbed(name):
            return None
        return fitted(self.linear, k)

    def check(self, cfg: ModelConfig) -> None:
        """Raises UsageError where no matrix of the model can be quantized so."""
        if self.linear and not any(self._counts(cfg)):
            raise UsageError(f"no matrix of this model can be quantized to {self.linear.kind}: its rows are too odd")

    def name(self, cfg: ModelConfig, plain: str) -> str:
        """For people: "w4 g64/g128 sym, head w8"; `plain` names what is not quantized."""
        linear = [scheme for scheme, _ in self._counts(cfg).most_common() if scheme]
        parts = [_joined(linear) if linear else plain]
        return ", ".join([*parts, "head w8"] if self.matrix(HEAD, cfg.hidden_size) else parts)

    def details(self, cfg: ModelConfig) -> tuple[str, ...]:
        """Which schemes the matrices of the blocks get, and how many are left as they are since no group divides."""
        counts = self._counts(cfg)
        each = [f"{count} in {scheme.name if scheme else 'full'}" for scheme, count in counts.most_common()]
        return (f"quantized while loading, of {counts.total()} matrices: {', '.join(each)}",) if self.linear else ()

    def _counts(self, cfg: ModelConfig) -> Counter[Scheme | None]:
        linear = {name: shape for name, shape in tensor_shapes(cfg).items() if is_linear(name)}
        return Counter(self.matrix(name, shape[-1]) for name, shape in linear.items())


AS_STORED = LoadScheme()


def fitted(scheme: Scheme, k: int) -> Scheme | None:
    """`scheme` with a group that divides rows of `k`; None where there is none."""
    if scheme.kind != "int":
        return scheme if scheme.divides(k) else None
    group = next((g for g in GROUPS if k % g == 0), None)
    return replace(scheme, group=group) if group else None


def weight_bytes(cfg: ModelConfig, itemsize: int, scheme_of: SchemeOf) -> int:
    """What the weights take, where `scheme_of(name, k)` packs a matrix and plain ones have `itemsize` an element."""
    shapes = tensor_shapes(cfg)
    if cfg.tie and scheme_of(HEAD, cfg.hidden_size):
        shapes |= {HEAD: (cfg.vocab, cfg.hidden_size)}  # a packed head is one of its own
    bits = 0.0
    for name, shape in shapes.items():
        scheme = scheme_of(name, shape[-1]) if len(shape) == 2 else None
        bits += math.prod(shape) * (scheme.bits_per_weight(shape[-1]) if scheme else 8 * itemsize)
    return math.ceil(bits / 8)


def _joined(schemes: list[Scheme]) -> str:
    """One name for schemes that differ in their groups."""
    first = schemes[0]
    groups = "/".join(f"g{s.group}" for s in schemes)
    return first.name.replace(f"g{first.group}", groups) if first.kind == "int" else first.name
