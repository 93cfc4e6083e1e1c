"""Where a model runs, and how much memory is free there."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

import torch

from minicpm_cli.doctor import why_no_gpu
from minicpm_cli.errors import DeviceError, UsageError
from quant.kernels import targets

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_MEMINFO = "/proc/meminfo"
_SMALLEST_CONTEXT, _LARGEST_CONTEXT = 32 << 20, 4 << 30  # other processes come and go while it is measured


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU with most free memory, or the CPU where there is none. Raises DeviceError.

    The GPU becomes the current one: kernels that are not torch's are launched there.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError(f"--device {name}: {why_no_gpu()}. minicpm doctor says more; --device cpu runs on the CPU.")
    count = torch.cuda.device_count()
    if name in ("auto", "cuda"):
        index = max(range(count), key=lambda i: torch.cuda.mem_get_info(i)[0])
    else:
        index = int(name.removeprefix("cuda:"))
    if index >= count:
        here = ", ".join(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(count))
        raise DeviceError(f"--device {name} does not exist. There are: {here}.")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bf16, the type that the family was trained in. Raises DeviceError for a GPU without it."""
    if name == "auto":
        name = "bf16"
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            raise DeviceError(
                f"{torch.cuda.get_device_name(device)} has no bf16. Take --dtype fp32 (fp16 may overflow)."
            )
    if name not in DTYPES:
        raise UsageError(f"--dtype {name} is not known; it must be one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def check_cache(kv_dtype: str, device: torch.device) -> None:
    """Raises DeviceError for a GPU whose kernels cannot convert the cache's codes: fp8 begins with capability 8.9.

    Older GPUs than Triton knows take torch's operations, which can.
    """
    if kv_dtype != "fp8" or device.type != "cuda" or not targets.triton_compiles(device):
        return
    if torch.cuda.get_device_capability(device) < (8, 9):
        raise DeviceError(f"{torch.cuda.get_device_name(device)} cannot convert fp8. Take --kv-dtype int8.")


def dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)


def free_bytes(device: torch.device) -> int:
    """Memory that nobody uses now: the GPU's, or the machine's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open(_MEMINFO, encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return _physical_bytes()


def total_bytes(device: torch.device) -> int:
    """0 where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return _installed_bytes() or 0


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def free_by_driver() -> dict[str, int]:
    """Free bytes of each GPU by its UUID, as nvidia-smi tells them without a context of this process's own."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return {}
    query = [smi, "--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        rows = [line.split(",") for line in done.stdout.splitlines()]
        return {uuid.strip(): int(free) << 20 for uuid, free in rows}
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}


def context_bytes(device: torch.device, before: Mapping[str, int]) -> int:
    """What this process's context takes on a GPU, `before` being what was free without it; 0 where nobody can tell."""
    uuid = f"GPU-{getattr(torch.cuda.get_device_properties(device), 'uuid', '')}"
    taken = before.get(uuid, 0) - torch.cuda.mem_get_info(device)[0]
    return taken if _SMALLEST_CONTEXT < taken < _LARGEST_CONTEXT else 0


def _physical_bytes() -> int:
    """Half of what is installed, where the system does not say what is free."""
    return (_installed_bytes() or 8 * 2**30) // 2


def _installed_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
