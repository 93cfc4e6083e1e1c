"""What this machine has for running models, and what to do about what it lacks."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from minicpm_cli.hub.files import size_text
from minicpm_cli.settings import Settings, visible_devices

Status = Literal["ok", "warn", "fail"]
LIBRARIES = ("transformers", "tokenizers", "safetensors", "gguf", "huggingface_hub", "triton", "bitsandbytes")
# CUDA 12's minor-version compatibility starts at this driver on Linux (NVIDIA, CUDA Compatibility).
OLDEST_DRIVER = 525


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
        Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        _cpu(),
        _driver_check(driver),
        *_torch(driver),
        *(_library(name) for name in LIBRARIES),
        _memory(),
        _cache(settings.cache_dir),
    ]


def _driver() -> str | None:
    """The NVIDIA driver's version and the cards' names, as nvidia-smi tells them."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    query = [smi, "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _driver_check(driver: str | None) -> Check:
    if driver is None:
        advice = "a GPU needs the NVIDIA driver (nvidia-smi must answer); without one models run on the CPU, slowly"
        return Check("nvidia driver", "warn", "none found", advice)
    major = driver.split(".")[0]
    if major.isdigit() and int(major) < OLDEST_DRIVER:
        return Check(
            "nvidia driver", "fail", driver, f"older than {OLDEST_DRIVER}: update the driver for current torch"
        )
    return Check("nvidia driver", "ok", "; ".join(driver.splitlines()))


def _torch(driver: str | None) -> list[Check]:
    import torch

    built = torch.version.cuda
    version = f"{torch.__version__} ({f'CUDA {built}' if built else 'no CUDA'})"
    if torch.cuda.is_available():
        return [Check("torch", "ok", version), *(_gpu(i) for i in range(torch.cuda.device_count()))]
    if driver is None:
        return [Check("torch", "ok", version)]
    if built is None:
        advice = "there is a GPU, but this torch is a CPU build: pip install --force-reinstall torch"
        return [Check("torch", "fail", version, advice)]
    return [Check("torch", "fail", version, _hidden())]


def _hidden() -> str:
    visible = visible_devices()
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides the GPUs: unset it"
    return "torch cannot use the GPU: the driver may be older than this torch's CUDA, update one of them"


def _gpu(index: int) -> Check:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    capability = torch.cuda.get_device_capability(index)
    value = f"{torch.cuda.get_device_name(index)}, capability {capability[0]}.{capability[1]}, "
    value += f"{size_text(free)} free of {size_text(total)}"
    if capability < (8, 0):
        return Check(f"cuda:{index}", "warn", value, "no bf16 in hardware: use --dtype fp32")
    return Check(f"cuda:{index}", "ok", value)


def _library(name: str) -> Check:
    try:
        return Check(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        optional = name in ("triton", "bitsandbytes")
        advice = "only needed on a GPU" if optional else f"pip install {name}"
        return Check(name, "ok" if optional else "fail", "not installed", advice)


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


def _cache(folder: Path) -> Check:
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    free = size_text(shutil.disk_usage(existing).free)
    if not os.access(existing, os.W_OK):
        return Check("cache", "fail", f"{folder} is not writable", "point MINICPM_CACHE_DIR at a folder that is")
    return Check("cache", "ok", f"{folder}, {free} free, Python {sys.prefix}")
