"""Where a number was measured: device, driver, versions, commit, date."""

from __future__ import annotations

import datetime
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from minicpm_cli import __version__
from minicpm_cli.bench.rows import OUR_ENGINE, Setting

LIBRARIES = ("torch", "transformers", "triton")


def setting_for(device: torch.device, model: str, scheme: str, engine: str = OUR_ENGINE) -> Setting:
    """The setting of a measurement made here and now."""
    gpu = device.type == "cuda"
    return Setting(
        device=torch.cuda.get_device_name(device) if gpu else cpu_name(),
        threads=None if gpu else torch.get_num_threads(),
        driver=driver_version() if gpu else None,
        versions=versions(gpu),
        commit=commit(),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        model=model,
        scheme=scheme,
        engine=engine,
    )


def versions(gpu: bool) -> dict[str, str]:
    """Of this package and of the libraries that are installed; triton's only where it can matter."""
    found = {"minicpm-cli": __version__}
    for name in LIBRARIES if gpu else LIBRARIES[:2]:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """As Linux's /proc/cpuinfo gives it, else what the platform says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n")
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def driver_version() -> str | None:
    answer = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return answer.split("\n")[0] if answer else None


def commit() -> str | None:
    """The short hash of the checkout that this package runs from, with a + for changes that it does not hold.

    None if the package is installed from a wheel.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    found = _output([*git, "rev-parse", "--short", "HEAD"])
    return f"{found}+" if found and _output([*git, "status", "--porcelain"]) else found


def _output(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
