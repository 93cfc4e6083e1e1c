"""Schemes: names, sizes, and the groups that a row allows."""

from __future__ import annotations

import pytest

from quant.errors import SchemeError
from quant.scheme import Scheme


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        (Scheme("int"), "w4 g128 sym"),
        (Scheme("int", 8, -1, symmetric=False), "w8 row asym"),
        (Scheme("int", 4, 32, act_order=True), "w4 g32 sym act-order"),
        (Scheme("nf4"), "nf4"),
        (Scheme("int8"), "int8"),
        (Scheme("fp8"), "fp8"),
    ],
)
def test_names(scheme: Scheme, name: str) -> None:
    assert scheme.name == name


def test_short_names() -> None:
    assert Scheme.named("w8") == Scheme("int", 8, 128)
    assert Scheme.named("nf4") == Scheme("nf4")
    with pytest.raises(SchemeError, match="w4, w8, nf4, int8, fp8"):
        Scheme.named("w3")


def test_fixed_kinds_ignore_the_other_fields() -> None:
    assert Scheme("int8", 4, 32, symmetric=False, act_order=True) == Scheme("int8")
    assert Scheme("nf4", 8).bits == 4


@pytest.mark.parametrize("group", [-1, 32, 64, 96, 192, 576])
def test_576_divides_by(group: int) -> None:
    assert Scheme("int", 4, group).divides(576)


def test_576_does_not_divide_by_128_but_allows_others() -> None:
    scheme = Scheme("int")
    assert not scheme.divides(576)
    assert scheme.groups_for(576) == (32, 64, 96, 192)
    assert scheme.fitted(576) == Scheme("int", 4, 96)
    assert scheme.fitted(1024) is scheme
    with pytest.raises(SchemeError, match="100"):
        scheme.fitted(100)


def test_rows_that_fill_no_words() -> None:
    assert not Scheme("int", 4, -1).divides(100)
    assert Scheme("int", 8, -1).divides(100)
    assert not Scheme("int", 8, -1).divides(98)


def test_bits_of_a_weight() -> None:
    assert Scheme("int").bits_per_weight(4096) == 4 + 20 / 128
    assert Scheme("int", 8, -1).bits_per_weight(1024) == 8 + 24 / 1024
    assert Scheme("nf4").bits_per_weight(1024) == 4.5
    assert Scheme("fp8").bits_per_weight(1024) == 8 + 32 / 1024


@pytest.mark.parametrize("wrong", [{"bits": 3}, {"group": 0}, {"group": 100}, {"kind": "int4"}])
def test_schemes_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(SchemeError):
        Scheme(**({"kind": "int"} | wrong))
