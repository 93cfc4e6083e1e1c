"""CUDA C++ compiled at run time by NVRTC, kept on disk by all that it depends on, and launched on torch's stream.

NVRTC and the driver are reached through `cuda.bindings`, which torch's CUDA builds bring along since 2.11.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quant.errors import QuantError

FLAGS = ("--std=c++17", "--device-as-default-execution-space")
DIGEST_BYTES = 32


class KernelError(QuantError):
    """A kernel that cannot be compiled or loaded here."""


@functools.cache
def unavailable() -> str | None:
    """Why no kernel can be compiled in this process; None where it can."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.cuda.get_device_capability() < (9, 0):
        major, minor = torch.cuda.get_device_capability()
        return f"the GPU's compute capability is {major}.{minor}; the kernels need 9.0 (Hopper) or later"
    try:
        from cuda.bindings import driver, nvrtc  # noqa: F401
    except ImportError as error:
        return f"the package cuda-bindings cannot be imported ({error}); `pip install cuda-bindings` adds it"
    return None


def compile_cubin(source: str, options: Sequence[str], arch: str) -> bytes:
    """Machine code for `arch` (sm_90); KernelError with the compiler's log where the source does not compile."""
    from cuda.bindings import nvrtc

    program = _done(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, None, None))
    try:
        flags = [f.encode() for f in (f"--gpu-architecture={arch}", *FLAGS, *options)]
        status = nvrtc.nvrtcCompileProgram(program, len(flags), flags)[0]
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * _done(nvrtc.nvrtcGetProgramLogSize(program))
            _done(nvrtc.nvrtcGetProgramLog(program, log))
            raise KernelError(f"a CUDA kernel does not compile ({' '.join(options)}): {log.decode().strip()}")
        code = b" " * _done(nvrtc.nvrtcGetCUBINSize(program))
        _done(nvrtc.nvrtcGetCUBIN(program, code))
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def cached_cubin(source: str, options: Sequence[str], arch: str, folder: Path | None) -> bytes:
    """`compile_cubin` through a folder of earlier results; a damaged file is compiled again and replaced."""
    if folder is None:
        return compile_cubin(source, options, arch)
    file = folder / f"{_key(source, options, arch)}.cubin"
    code = _read(file)
    if code is None:
        code = compile_cubin(source, options, arch)
        _write(file, code)
    return code


def _key(source: str, options: Sequence[str], arch: str) -> str:
    from cuda.bindings import driver, nvrtc

    versions = (*_done(nvrtc.nvrtcVersion()), _done(driver.cuDriverGetVersion()))
    parts = (source, *options, arch, *map(str, versions))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _read(file: Path) -> bytes | None:
    """The code in `file` if it is whole: its own SHA-256 stands before it."""
    try:
        data = file.read_bytes()
    except OSError:
        return None
    digest, code = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write(file: Path, code: bytes) -> None:
    """All or nothing; a folder that cannot be written costs a compilation at the next start, no more."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(handle, "wb") as out:
            out.write(hashlib.sha256(code).digest() + code)
        Path(name).replace(file)
    except OSError:
        return


def _done(result: tuple[Any, ...]) -> Any:
    """What a call of the bindings returned besides its status."""
    status, *values = result
    if int(status) != 0:
        raise KernelError(f"CUDA refused a kernel: {status!r}")
    return values[0] if len(values) == 1 else tuple(values)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A loaded function of one module, in the context of the device that was current."""

    function: Any
    module: Any

    def launcher(
        self,
        grid: int,
        threads: int,
        shared_bytes: int,
        parameters: ctypes.Structure,
        *,
        overlaps: bool = True,
        cluster: int = 1,
    ) -> Launcher:
        return Launcher(self, grid, threads, shared_bytes, parameters, overlaps=overlaps, cluster=cluster)


class Launcher:
    """A launch prepared once: one structure as the only parameter, whose fields the caller sets between calls.

    If it `overlaps` the end of the launch before it on the stream (programmatic dependent launch), the kernel itself
    waits, with griddepcontrol.wait, before it reads what that one wrote. `cluster`: blocks of one, at most 8, where the
    kernel itself does not say it.
    """

    def __init__(
        self,
        kernel: Kernel,
        grid: int,
        threads: int,
        shared_bytes: int,
        parameters: ctypes.Structure,
        *,
        overlaps: bool = True,
        cluster: int = 1,
    ) -> None:
        from cuda.bindings import driver

        self.parameters = parameters
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
        self._arguments = ctypes.addressof(self._pointers)
        attributes = _attributes(overlaps, cluster)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.attrs, config.numAttrs = attributes, len(attributes)
        self._config, self._kernel, self._launch = config, kernel, driver.cuLaunchKernelEx
        self._stream = -1

    def __call__(self, stream: int) -> None:
        if stream != self._stream:
            from cuda.bindings import driver

            self._config.hStream, self._stream = driver.CUstream(stream), stream
        status = self._launch(self._config, self._kernel.function, self._arguments, 0)[0]
        if status:
            raise KernelError(f"CUDA refused to launch a kernel: {status!r}")


def _attributes(overlaps: bool, cluster: int) -> list[Any]:
    from cuda.bindings import driver

    attributes = []
    if overlaps:
        attributes.append(driver.CUlaunchAttribute())
        attributes[-1].id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attributes[-1].value.programmaticStreamSerializationAllowed = 1
    if cluster > 1:
        attributes.append(driver.CUlaunchAttribute())
        attributes[-1].id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attributes[-1].value.clusterDim
        size.x, size.y, size.z = cluster, 1, 1
    return attributes


def build(
    name: str,
    source: str,
    options: Sequence[str],
    device: torch.device,
    shared_bytes: int,
    folder: Path | None,
    feature: str = "",
) -> Kernel:
    """The function `name` of `source` for `device`, compiled or read from `folder`.

    `feature` is "a" for instructions that only this very architecture has.
    """
    major, minor = torch.cuda.get_device_capability(device)
    with torch.cuda.device(device):
        torch.zeros(1, device=device)  # makes the device's context current in this thread
        return load(cached_cubin(source, options, f"sm_{major}{minor}{feature}", folder), name, shared_bytes)


def load(cubin: bytes, name: str, shared_bytes: int) -> Kernel:
    """The function `name`, allowed to use `shared_bytes` a block, in the context that torch uses."""
    from cuda.bindings import driver

    torch.cuda.current_stream()  # torch makes the device's primary context current
    module = _done(driver.cuModuleLoadData(cubin))
    function = _done(driver.cuModuleGetFunction(module, name.encode()))
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _done(driver.cuFuncSetAttribute(function, most, shared_bytes))
    return Kernel(function, module)
