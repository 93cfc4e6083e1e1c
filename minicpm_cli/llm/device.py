"""Where a model runs, and how much memory is free there."""

from __future__ import annotations

import torch

from minicpm_cli.doctor import why_no_gpu
from minicpm_cli.errors import DeviceError, UsageError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_MEMINFO = "/proc/meminfo"


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU with most free memory, or the CPU where there is none. Raises DeviceError."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError(f"--device {name}: {why_no_gpu()}. minicpm doctor says more; --device cpu runs on the CPU.")
    count = torch.cuda.device_count()
    if name in ("auto", "cuda"):
        return torch.device("cuda", max(range(count), key=lambda i: torch.cuda.mem_get_info(i)[0]))
    index = int(name.removeprefix("cuda:"))
    if index >= count:
        here = ", ".join(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(count))
        raise DeviceError(f"--device {name} does not exist. There are: {here}.")
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


def _physical_bytes() -> int:
    """Half of what is installed, where the system does not say what is free."""
    import os

    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return 4 * 2**30
