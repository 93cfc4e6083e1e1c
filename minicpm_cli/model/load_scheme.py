"""What is quantized while a checkpoint is loaded: by rounding, matrix by matrix, and nothing is written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType

from minicpm_cli.errors import UsageError
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.shapes import HEAD, is_absorbed, is_linear, tensor_shapes
from quant.scheme import ROW, Scheme

GROUPS = (128, 64, 32)  # of 4 bits; the largest that divides a row is taken
# 8 bits have one scale a row, which a CPU multiplies as they are: in groups they would take more memory than bf16. The
# demo's perplexity of 15.24 becomes 15.29 with such a head, 15.25 with groups of 64; with one of 4 bits 17.42.
HEAD_SCHEMES = MappingProxyType({8: Scheme("int", 8, ROW), 4: Scheme("int", 4, GROUPS[0], symmetric=False)})
SchemeOf = Callable[[str, int], Scheme | None]


@dataclass(frozen=True, slots=True)
class LoadScheme:
    """Schemes of the blocks' matrices and of the output head; None: as they come."""

    linear: Scheme | None = None
    head: Scheme | None = None

    @classmethod
    def of(cls, quantize: str | None, head_bits: int) -> LoadScheme:
        """From the options' values. Embedding, norms, routers and what MLA absorbs are never quantized.

        4 bits get zero points, which no file has to hold: the demo's perplexity of 15.2 becomes 20.2 instead of 22.7.
        """
        scheme = Scheme.named(quantize) if quantize else None
        if scheme and (scheme.kind, scheme.bits) == ("int", 4):
            scheme = replace(scheme, symmetric=False)
        return cls(scheme, HEAD_SCHEMES.get(head_bits))

    def matrix(self, name: str, k: int) -> Scheme | None:
        """How the matrix `name` of rows of `k` is quantized; None: not at all."""
        if name == HEAD:
            return fitted(self.head, k) if self.head else None
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
        head = self.matrix(HEAD, cfg.hidden_size)
        return ", ".join([*parts, f"head w{head.bits}"] if head else parts)

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
    """`scheme` with a group that suits rows of `k`; None where there is none."""
    if scheme.kind == "int":
        group = ROW if scheme.bits == 8 else next((g for g in GROUPS if k % g == 0), 0)
        scheme = replace(scheme, group=group) if group else scheme
    return scheme if scheme.divides(k) else None


def weight_bytes(cfg: ModelConfig, itemsize: int, scheme_of: SchemeOf, *, cpu: bool = False) -> int:
    """What the weights take, where `scheme_of(name, k)` packs a matrix and plain ones have `itemsize` an element."""
    shapes = tensor_shapes(cfg)
    if cfg.tie and scheme_of(HEAD, cfg.hidden_size):
        shapes |= {HEAD: (cfg.vocab, cfg.hidden_size)}  # a packed head is one of its own
    bits = 0.0
    for name, shape in shapes.items():
        scheme = scheme_of(name, shape[-1]) if len(shape) == 2 else None
        bits += math.prod(shape) * weight_bits(scheme, shape[-1], itemsize, cpu=cpu)
    return math.ceil(bits / 8)


def weight_bits(scheme: Scheme | None, k: int, itemsize: int, *, cpu: bool = False) -> float:
    """Bits of memory a weight in rows of `k`.

    On a CPU fp8 is unpacked, as everything is but for bf16 activations, and 4 bits lie beside the product's own tiles.
    """
    if scheme is None or (cpu and (itemsize != 2 or scheme.kind == "fp8")):
        return 8 * itemsize
    return scheme.bits_per_weight(k) * (2 if cpu and scheme.bits == 4 else 1)


def _joined(schemes: list[Scheme]) -> str:
    """One name for schemes that differ in their groups."""
    first = schemes[0]
    return first.name.replace(f"g{first.group}", "/".join(f"g{s.group}" for s in schemes))
