"""Tests marked `gpu` are skipped where there is no CUDA device; the demo model is fetched once for all that ask."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from minicpm_cli.settings import Settings


def pytest_configure() -> None:
    """No test reaches a model hub, whatever the machine's settings; the fake hub's tests lift it for themselves."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    if (
        "PYTEST_XDIST_WORKER" in os.environ
    ):  # workers with a thread a core each make each other's barriers spin for seconds
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    if not torch.cuda.is_available():  # before anything imports triton, which reads it once
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernel_device(request: pytest.FixtureRequest) -> str:
    """Where a Triton kernel's test runs: on the CPU through the interpreter, or on the GPU."""
    if request.param == "cpu":
        pytest.importorskip("triton", reason="its interpreter runs kernels without a GPU")
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("the kernels are compiled for the GPU in this process")
    return str(request.param)


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's file, in the cache where `minicpm pull demo` keeps it."""
    from minicpm_cli.hub import demo
    from minicpm_cli.settings import Settings

    return demo.fetch(Settings.load().cache_dir)


@pytest.fixture
def isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings, and an environment for child processes, in which nothing is this machine's own."""
    from minicpm_cli.settings import Settings

    for name in [n for n in os.environ if n.startswith("MINICPM_")]:
        monkeypatch.delenv(name)
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("MINICPM_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("MINICPM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MINICPM_DATA_DIR", str(tmp_path / "data"))
    return Settings.load()
