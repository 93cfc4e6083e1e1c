"""How weights are to be quantized: a plain value that plans sizes without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

from quant.errors import SchemeError

Kind = Literal["int", "nf4", "int8", "fp8"]

GROUPS = (32, 64, 96, 128, 192, 256)
ROW = -1  # a group that spans the whole row
SCALE_BITS = 16
NF4_BLOCK = 64
# Every kind but "int" fixes its bits and group.
FIXED: dict[str, tuple[int, int]] = {"nf4": (4, NF4_BLOCK), "int8": (8, ROW), "fp8": (8, ROW)}
SHORT: dict[str, tuple[Kind, int]] = {
    "w4": ("int", 4),
    "w8": ("int", 8),
    "nf4": ("nf4", 4),
    "int8": ("int8", 8),
    "fp8": ("fp8", 8),
}


@dataclass(frozen=True, slots=True)
class Scheme:
    """`int`: integers with one scale and zero point for `group` neighbours along a row (-1: for the row).

    `nf4` and `int8` are bitsandbytes' formats, `fp8` is e4m3 with one scale a row; they ignore the other fields.
    """

    kind: Kind
    bits: int = 4
    group: int = 128
    symmetric: bool = True
    act_order: bool = False

    def __post_init__(self) -> None:
        if self.kind in FIXED:
            bits, group = FIXED[self.kind]
            for name, value in (("bits", bits), ("group", group), ("symmetric", True), ("act_order", False)):
                object.__setattr__(self, name, value)
        elif self.kind != "int":
            raise SchemeError(f"Unknown scheme {self.kind!r}; there are int, nf4, int8 and fp8.")
        if self.bits not in (4, 8):
            raise SchemeError(f"{self.bits} bits are not supported; choose 4 or 8.")
        if self.group != ROW and (self.group < 8 or self.group % 8):
            raise SchemeError(
                f"A group of {self.group} is not supported; choose -1 (the whole row) or a multiple of 8."
            )

    @classmethod
    def named(cls, name: str) -> Self:
        """The scheme of a short name: w4, w8 (groups of 128, symmetric), nf4, int8 or fp8."""
        if name not in SHORT:
            raise SchemeError(f"Unknown scheme {name!r}; choose one of {', '.join(SHORT)}.")
        kind, bits = SHORT[name]
        return cls(kind, bits)

    @property
    def name(self) -> str:
        """For people: "w4 g128 sym", "w8 row asym act-order", "nf4"."""
        if self.kind != "int":
            return self.kind
        group = "row" if self.group == ROW else f"g{self.group}"
        return f"w{self.bits} {group} {'sym' if self.symmetric else 'asym'}{' act-order' if self.act_order else ''}"

    def width(self, k: int) -> int:
        """Columns that share a scale in a row of `k`."""
        return k if self.group == ROW else self.group

    def bits_per_weight(self, k: int) -> float:
        """Stored bits of a weight in rows of `k`, scales and zero points included (GPTQ's files always hold both)."""
        extra = SCALE_BITS + self.bits if self.kind == "int" else 32
        return self.bits + extra / self.width(k)

    def divides(self, k: int) -> bool:
        """Whether rows of `k` fall into whole groups and, packed, into whole 32-bit words."""
        if self.kind != "int":
            return True  # NF4's blocks run across the ends of rows
        return k % self.width(k) == 0 and k * self.bits % 32 == 0

    def fitted(self, k: int) -> Scheme:
        """This scheme with the largest group up to its own that divides `k`; SchemeError where none does."""
        if self.divides(k):
            return self
        smaller = [g for g in groups_for(k) if g <= self.group]
        if not smaller:
            raise SchemeError(f"No group of {self.name} divides rows of {k}; leave this layer as it is.")
        return replace(self, group=smaller[-1])

    def groups_for(self, k: int) -> tuple[int, ...]:
        """Groups that divide rows of `k`, to suggest."""
        return groups_for(k)


def groups_for(k: int) -> tuple[int, ...]:
    return tuple(g for g in GROUPS if k % g == 0)
