"""Single modules of packages that no longer import as a whole on today's transformers, such as auto-gptq and AutoAWQ.

Their packers, readers and solvers still work, and check ours independently.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from types import ModuleType

import pytest


def bare_import(name: str) -> ModuleType:
    """Imports a module without running the __init__ of the packages around it; skips the test file where it is missing.

    Every test that needs such a package must import it through here, or would get it half initialized.
    """
    parents = name.split(".")[:-1]
    if importlib.util.find_spec(parents[0]) is None:
        pytest.skip(f"{parents[0]} is not installed (.ci/check installs it)", allow_module_level=True)
    for i in range(len(parents)):
        _register(".".join(parents[: i + 1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old packages on new Python and torch
        return importlib.import_module(name)


def _register(package: str) -> None:
    """Puts an empty package into sys.modules that only knows where its modules are."""
    if package not in sys.modules:
        spec = importlib.util.find_spec(package)
        assert spec is not None, package
        sys.modules[package] = importlib.util.module_from_spec(spec)
