"""What this machine has for running models, and what to do about what it lacks."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from minicpm_cli.hub.files import size_text
from minicpm_cli.settings import Settings, visible_devices

Status = Literal["ok", "warn", "fail"]
LIBRARIES = (
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "huggingface_hub",
    "triton",
    "cuda-bindings",
    "bitsandbytes",
)
GPU_ONLY = ("triton", "cuda-bindings", "bitsandbytes")
# CUDA major version -> oldest Linux driver under its minor-version compatibility (NVIDIA, CUDA Compatibility).
OLDEST_DRIVERS = MappingProxyType({"11": 450, "12": 525, "13": 580})
LITTLE_DISK = 2 * 10**9  # bytes; less than the smallest MiniCPM needs


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report; `advice` is empty where there is nothing to do."""

    name: str
    status: Status
    value: str
    advice: str = ""


def report(settings: Settings) -> list[Check]:
    """All checks, in the order in which a reader needs them. Nothing is changed and nothing is fetched."""
    driver = _driver()
    return [
        Check("python", "ok", f"{platform.python_version()} in {sys.prefix}"),
        Check("system", "ok", f"{platform.system()} {platform.release()} {platform.machine()}"),
        _cpu(),
        _memory(),
        *_gpus(driver),
        *(_library(name, gpu=driver is not None) for name in LIBRARIES),
        _pip(),
        _folder("cache", settings.cache_dir, "MINICPM_CACHE_DIR"),
        _folder("hub cache", _hub_cache(), "HF_HOME"),
    ]


def why_no_gpu() -> str:
    """Why torch cannot use a GPU here, with the versions at odds and what to do; for machines where it cannot."""
    import torch

    driver, built = _driver(), torch.version.cuda
    if built is None and torch.version.hip is None:
        if driver is None:
            return f"torch {torch.__version__} is a CPU build, and no NVIDIA driver answers"
        return (
            f"torch {torch.__version__} is a CPU build, although there is a GPU ({_first(driver)}): "
            "pip install --force-reinstall torch, from the index that pytorch.org names for CUDA"
        )
    visible = visible_devices()
    if visible is not None and visible.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides every GPU: unset it"
    if driver is None:
        return f"torch is built for CUDA {built}, but no NVIDIA driver answers (nvidia-smi)"
    oldest = OLDEST_DRIVERS.get(str(built).split(".")[0])
    if oldest and _major(driver) < oldest:
        return (
            f"driver {_version(driver)} is too old for CUDA {built}, which needs {oldest} or newer: update the driver"
        )
    hidden = f" (CUDA_VISIBLE_DEVICES is {visible!r})" if visible is not None else ""
    return f"torch {torch.__version__} with CUDA {built} finds no usable GPU under driver {_first(driver)}{hidden}"


def _driver() -> str | None:
    """A line for each card: the NVIDIA driver's version, name, memory, as nvidia-smi tells them."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    query = [smi, "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _first(driver: str) -> str:
    return driver.splitlines()[0]


def _version(driver: str) -> str:
    return _first(driver).split(",")[0]


def _major(driver: str) -> int:
    major = _version(driver).split(".")[0]
    return int(major) if major.isdigit() else 0


def _gpus(driver: str | None) -> list[Check]:
    """The driver, torch, and each GPU that torch can use."""
    cards = "; ".join(driver.splitlines()) if driver else "none found"
    try:
        import torch
    except (ImportError, OSError) as error:
        broken = Check("torch", "fail", f"cannot be imported: {error}", "pip install --force-reinstall torch")
        return [Check("nvidia driver", "ok" if driver else "warn", cards), broken]
    build = torch.version.cuda or torch.version.hip
    version = f"{torch.__version__} ({f'CUDA {build}' if build else 'CPU build'})"
    with warnings.catch_warnings():  # what they say, why_no_gpu says with what to do
        warnings.simplefilter("ignore")
        usable = torch.cuda.is_available()
    if usable:
        gpus = [_gpu(i) for i in range(torch.cuda.device_count())]
        return [Check("nvidia driver", "ok", cards), Check("torch", "ok", version), *gpus]
    if driver is None:
        advice = "a GPU needs the NVIDIA driver (nvidia-smi must answer); without one models run on the CPU, slowly"
        return [Check("nvidia driver", "warn", cards, advice), Check("torch", "ok", version)]
    return [Check("nvidia driver", "ok", cards), Check("torch", "fail", version, why_no_gpu())]


def _gpu(index: int) -> Check:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    capability = torch.cuda.get_device_capability(index)
    value = f"{torch.cuda.get_device_name(index)}, capability {capability[0]}.{capability[1]}, "
    value += f"{size_text(free)} free of {size_text(total)}"
    if capability < (8, 0):
        return Check(f"cuda:{index}", "warn", value, "no bf16 in hardware: use --dtype fp32")
    return Check(f"cuda:{index}", "ok", value)


def _library(name: str, *, gpu: bool) -> Check:
    try:
        return Check(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        if name in GPU_ONLY and not gpu:
            return Check(name, "ok", "not installed", "only needed on a GPU")
        status: Status = "warn" if name in GPU_ONLY else "fail"
        return Check(name, status, "not installed", f"pip install {name}")


def _pip() -> Check:
    if importlib.util.find_spec("pip") is None:
        return Check("pip", "warn", "not installed", f"the demo model needs it: {sys.executable} -m ensurepip")
    return Check("pip", "ok", metadata.version("pip"))


def _cpu() -> Check:
    flags = _cpu_flags()
    fast = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    return Check("cpu", "ok", f"{os.cpu_count()} threads" + (f", {' '.join(fast)}" if fast else ""))


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return set(next((line.split(":", 1)[1] for line in lines if line.startswith("flags")), "").split())


def _memory() -> Check:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return Check("memory", "ok", "unknown on this system")
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    value = f"{size_text(sizes['MemAvailable'])} free of {size_text(sizes['MemTotal'])}"
    return Check("memory", "ok", value)


def _hub_cache() -> Path:
    from minicpm_cli.hub.cache import root

    return root()


def _folder(name: str, folder: Path, variable: str) -> Check:
    """Can the folder be written (or made), and is there room in it?"""
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Check(name, "fail", f"{folder} cannot be written", f"point {variable} at a folder that can")
    free = shutil.disk_usage(existing).free
    value = f"{folder}, {size_text(free)} free"
    if free < LITTLE_DISK:
        return Check(name, "warn", value, f"free some space, or point {variable} at another disk")
    return Check(name, "ok", value)
