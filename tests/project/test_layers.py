"""Modules that plan rather than compute import without torch; `import-linter` sees the rest."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

PLANNING = [
    "minicpm_cli.errors",
    "minicpm_cli.types",
    "minicpm_cli.settings",
    "minicpm_cli.hub",
    "minicpm_cli.hub.catalog",
    "minicpm_cli.text.tokenizer",
    "minicpm_cli.text.template",
    "minicpm_cli.text.detok",
    "minicpm_cli.engine.scheduler",
    "minicpm_cli.engine.pages",
    "minicpm_cli.engine.memory",
    "minicpm_cli.model.config",
    "minicpm_cli.model.gguf",
    "minicpm_cli.model.load_scheme",
    "minicpm_cli.model.quant_config",
    "minicpm_cli.model.quant_marks",
    "minicpm_cli.model.shapes",
    "minicpm_cli.llm.checkpoint",
    "minicpm_cli.llm.info",
    "minicpm_cli.bench.command",
    "minicpm_cli.cli",
    "quant.scheme",
]
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # any import of it now fails
import importlib
for name in sys.argv[1:]:
    importlib.import_module(name)
print("transformers" in sys.modules)
"""


def exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("name", [name for name in PLANNING if exists(name)])
def test_a_planning_module_needs_neither_torch_nor_transformers(name: str) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "False\n"
