"""A launch that is remembered gives the compiled kernel what Triton would give it."""

from __future__ import annotations

from typing import Any

import torch

from minicpm_cli.kernels.launch import Remembered


class Parameter:
    def __init__(self, name: str, constant: bool) -> None:
        self.name, self.is_constexpr = name, constant


class Jit:
    """Compiles at every launch through it; notes both kinds of launches."""

    params = [Parameter("x", False), Parameter("n", False), Parameter("B", True), Parameter("A", True)]

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_launch(*arguments: Any, **options: Any) -> Form:
            self.compiled.append(arguments)
            return Form(self, len(self.compiled))

        return compile_and_launch


class Form:
    def __init__(self, jit: Jit, number: int) -> None:
        self.jit, self.number = jit, number

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.jit.launched.append((self.number, grid, *arguments))


def test_what_is_compiled_once_is_launched_with_constants_in_order() -> None:
    jit = Jit()
    kernel, x = Remembered(jit), torch.zeros(8)
    kernel[(2,)](x, 7, A="a", B="b", num_warps=4)
    kernel[(3, 5)](x, 9, A="a", B="b", num_warps=4)
    assert len(jit.compiled) == 1
    assert jit.launched == [(1, (3, 5, 1), x, 9, "b", "a")]


def test_what_decides_the_form_makes_another() -> None:
    jit = Jit()
    kernel, x = Remembered(jit), torch.zeros(8)
    cases: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, 7), {"A": 1}),
        ((x, 1), {"A": 1}),
        ((x, 32), {"A": 1}),
        ((x, 2**31 + 1), {"A": 1}),
        ((x, None), {"A": 1}),
        ((x, 0.5), {"A": 1}),
        ((x[1:], 7), {"A": 1}),
        ((x.half(), 7), {"A": 1}),
        ((x, 7), {"A": 2}),
        ((x, 7), {"A": 1, "num_warps": 8}),
    ]
    for arguments, options in cases * 2:
        kernel[(1,)](*arguments, B=0, **options)
    assert len(jit.compiled) == len(cases)
    assert [number for number, *_ in jit.launched] == list(range(1, len(cases) + 1))
