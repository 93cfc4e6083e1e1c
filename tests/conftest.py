"""Tests marked `gpu` are skipped where there is no CUDA device; the demo model is fetched once for all that ask."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's file, in the cache where `minicpm pull demo` keeps it."""
    from minicpm_cli.hub import demo
    from minicpm_cli.settings import Settings

    return demo.fetch(Settings.load().cache_dir)
