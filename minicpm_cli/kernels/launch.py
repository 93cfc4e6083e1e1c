"""How kernels are launched: before their predecessor has ended, and without looking anew for what was compiled."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

ALIGNED = 16  # Triton compiles pointers and integers that this divides, and the integer 1, by themselves
LARGEST = 2**31 - 1  # of what it takes for an int32


def early(x: Tensor) -> bool:
    """Whether kernels on this tensor's device can overlap so: Hopper and later."""
    return x.is_cuda and _capability(x.device) >= (9, 0)


def dependent(x: Tensor) -> dict[str, bool]:
    """The launch option that goes with it. A kernel launched with it must wait before it reads what another wrote."""
    return {"launch_pdl": True} if early(x) else {}


class Remembered:
    """A kernel of Triton, used as such: `kernel[grid](*arguments, **constants_and_options)`.

    Triton works out at each launch which of its compiled forms fits: a step of 2,048 tokens launches 200 kernels, which
    took a host 43 us each. Here a form is found by the arguments' types and alignments, which decide it.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._forms: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        key = (arguments[0].device, *map(_kind, arguments), *options.items())
        form = self._forms.get(key)
        if form is None:
            compiled = self.kernel[grid](*arguments, **options)
            if compiled is not None and hasattr(self.kernel, "params"):  # not interpreted
                self._forms[key] = compiled, self._constants(len(arguments), options)
            return
        compiled, constants = form
        compiled[(*grid, 1, 1)[:3]](*arguments, *constants)

    def _constants(self, given: int, options: dict[str, Any]) -> tuple[Any, ...]:
        """In the order of the signature, where they come last."""
        assert not any(p.is_constexpr for p in self.kernel.params[:given]), "a constant is given by its name"
        return tuple(options[p.name] for p in self.kernel.params[given:])


def _kind(argument: Any) -> Any:
    """What of an argument decides how a kernel is compiled."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNED
    if type(argument) is int:
        return argument == 1, argument % ALIGNED == 0, -LARGEST <= argument <= LARGEST
    return type(argument)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
