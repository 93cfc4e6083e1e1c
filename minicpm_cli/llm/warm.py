"""What a start can do while Python reads other things: torch's libraries and the GPU's context need no interpreter.

On an H200's machine `import torch` takes 2.6 s, and the context 0.13 s after it.
"""

from __future__ import annotations

import ctypes
import gc
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_DRIVER = "libcuda.so.1"
_LIBRARIES = (("libtorch_global_deps.so", ctypes.RTLD_GLOBAL), ("libtorch.so", ctypes.DEFAULT_MODE))  # torch's order


def warm_up(device: str) -> threading.Thread | None:
    """Begins to load torch's libraries, and makes the context that torch will find; `device` as --device has it.

    What fails here fails again, and is told, where it is needed. None where there is nothing to gain.
    """
    if sys.platform != "linux" or "torch" in sys.modules:
        return None
    thread = threading.Thread(target=_warm, args=(device,), name="warm-up", daemon=True)
    thread.start()
    return thread


def has_driver() -> bool:
    """Whether there is a GPU's driver: a GPU is likely then."""
    with suppress(OSError):
        ctypes.CDLL(_DRIVER)
        return True
    return False


@contextmanager
def without_collector() -> Iterator[None]:
    """For imports, which make no garbage: looking for it takes an eighth of torch's, and all over again later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def heard_interrupts() -> Iterator[None]:
    """For imports: a Ctrl-C that one of them swallows, as torch's does while it looks for numpy, is raised at the end.

    What it left half imported would fail later, with an error that tells nothing.
    """
    heard: list[int] = []

    def note(number: int, frame: Any) -> None:
        heard.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or not _in_main_thread():
        yield
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield
    except Exception:
        if not heard:
            raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if heard:
        raise KeyboardInterrupt


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _warm(device: str) -> None:
    with suppress(OSError, AttributeError, ValueError):  # no such library, or one of another make
        spec = find_spec("torch")
        folder = Path(str(spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else ""))
        for name, mode in _LIBRARIES:
            ctypes.CDLL(str(folder / "lib" / name), mode)
    if device != "cpu":
        with suppress(OSError, AttributeError):  # no driver
            _make_context(int(device.partition(":")[2] or -1))


def _make_context(index: int) -> None:
    """Of the GPU `index`, or of the only one: the choice among several is not made here."""
    driver = ctypes.CDLL(_DRIVER)
    count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or (index < 0 and count.value != 1):
        return
    if not driver.cuDeviceGet(ctypes.byref(device), max(index, 0)):
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
