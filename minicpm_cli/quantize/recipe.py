"""What a user asks of a quantization, checked before anything loads. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from minicpm_cli.errors import UsageError
from quant.errors import SchemeError
from quant.scheme import ROW, Kind, Scheme

Method = Literal["gptq", "rtn", "nf4", "int8", "fp8"]
METHODS: tuple[Method, ...] = get_args(Method)
_KINDS: dict[str, Kind] = {"nf4": "nf4", "int8": "int8", "fp8": "fp8"}
REGEX = "re:"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to quantize. `group` -1 is the whole row; `calib` a file, or "self" for the model's own samples.

    `samples` rows of `seqlen` tokens calibrate; None leaves the choice to the device. `damp` is the share of the mean
    of the Hessian's diagonal that is added to it; `correction` is how much of what the layers before have lost a layer
    makes up for. `skip` names layers that stay plain: globs, or regular expressions
    behind "re:".
    """

    method: Method = "gptq"
    bits: int = 4
    group: int = 64
    symmetric: bool = True
    act_order: bool = False
    damp: float = 0.01
    correction: float = 0.5
    skip: tuple[str, ...] = ()
    head_bits: int = 16
    calib: str = "self"
    samples: int | None = None
    seqlen: int | None = None
    seed: int = 0
    force: bool = False

    def __post_init__(self) -> None:
        _check(self)

    @property
    def scheme(self) -> Scheme:
        if self.method in _KINDS:
            return Scheme(_KINDS[self.method])
        act_order = self.act_order and self.method == "gptq"
        return Scheme("int", self.bits, self.group, self.symmetric, act_order)

    @property
    def head_scheme(self) -> Scheme:
        """Of a head that is quantized too: eight bits in the layers' groups, rounded to nearest."""
        return Scheme("int", 8, self.group, self.symmetric)

    @property
    def calibrates(self) -> bool:
        """Whether the weights depend on calibration tokens."""
        return self.method == "gptq"

    @property
    def corrects(self) -> bool:
        """Whether they depend on what the original layers read, too."""
        return self.calibrates and self.correction > 0

    @property
    def name(self) -> str:
        """For people: "gptq w4 g64 sym"."""
        return self.scheme.name if self.method == self.scheme.kind else f"{self.method} {self.scheme.name}"

    def skips(self, layer: str) -> bool:
        return any(matches(pattern, layer) for pattern in self.skip)

    def unmatched(self, layers: Iterable[str]) -> list[str]:
        """Patterns of `skip` that name no layer."""
        layers = list(layers)
        return [pattern for pattern in self.skip if not any(matches(pattern, name) for name in layers)]

    def identity(self) -> dict[str, Any]:
        """What decides the written bytes, as JSON values."""
        values = asdict(self)
        del values["force"]
        return values | {"skip": list(self.skip)}


def matches(pattern: str, layer: str) -> bool:
    """A glob must match the whole name or what follows one of its dots; a regular expression any part of it."""
    if pattern.startswith(REGEX):
        return re.search(pattern.removeprefix(REGEX), layer) is not None
    parts = layer.split(".")
    return any(fnmatchcase(".".join(parts[start:]), pattern) for start in range(len(parts)))


def _check(recipe: Recipe) -> None:
    wrong = _wrong(recipe)
    if wrong:
        raise UsageError(wrong)
    try:
        _ = recipe.scheme
    except SchemeError as error:
        raise UsageError(str(error)) from None


def _wrong(recipe: Recipe) -> str | None:
    if recipe.method not in METHODS:
        return f"--method {recipe.method} is not known; it must be one of {', '.join(METHODS)}"
    if recipe.head_bits not in (8, 16):
        return f"--head-bits is {recipe.head_bits}; it must be 16 (left as it is) or 8"
    if recipe.head_bits == 8 and recipe.scheme.kind != "int":
        return f"--head-bits 8 goes with --method gptq or rtn; the files of {recipe.method} have no place for it"
    if recipe.group != ROW and recipe.group < 8:
        return f"--group-size is {recipe.group}; it must be 32, 64, 96, 128, another multiple of 8, or -1 for a row"
    if not 0 < recipe.damp < 1:  # transformers refuses to read a folder that names 1 or more
        return f"--damp is {recipe.damp}; it must be above 0 and below 1"
    if not 0 <= recipe.correction <= 1:
        return f"--correction is {recipe.correction}; it must be from 0 (none) to 1"
    for flag, value in (("--samples", recipe.samples), ("--seqlen", recipe.seqlen)):
        if value is not None and value < (2 if flag == "--seqlen" else 1):
            return f"{flag} is {value}; it must be a larger whole number"
    return next(filter(None, map(_wrong_pattern, recipe.skip)), None)


def _wrong_pattern(pattern: str) -> str | None:
    if not pattern:
        return "--skip is empty; give a layer's name or a pattern such as '*.down_proj'"
    try:
        re.compile(pattern.removeprefix(REGEX) if pattern.startswith(REGEX) else "")
    except re.error as error:
        return f"--skip {pattern}: not a regular expression ({error})"
    return None
