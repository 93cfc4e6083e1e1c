"""The doctor on machines that this one is not: drivers too old, CPU builds of torch, hidden GPUs, full disks."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch

from minicpm_cli import doctor
from minicpm_cli.doctor import Check, report, why_no_gpu
from minicpm_cli.errors import DeviceError
from minicpm_cli.llm.device import check_cache, choose_device
from minicpm_cli.settings import Settings
from quant.kernels import targets

CARDS = "550.54.15, NVIDIA L4, 23034 MiB\n550.54.15, NVIDIA T4, 15360 MiB"


class Machine:
    """What nvidia-smi and torch say, to be set by a test."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch = tmp_path / "bin", monkeypatch
        self._folder.mkdir()
        monkeypatch.setenv("PATH", str(self._folder))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        self.current: list[int] = []  # what was made the current GPU
        self.cuda(None)
        self.gpus([])

    def driver(self, answer: str, code: int = 0) -> None:
        script = self._folder / "nvidia-smi"
        script.write_text(f"#!/bin/sh\nprintf '%s\\n' '{answer}'\nexit {code}\n")
        script.chmod(0o755)

    def cuda(self, version: str | None) -> None:
        self._patch.setattr(torch.version, "cuda", version)
        self._patch.setattr(torch.version, "hip", None)

    def gpus(self, free: list[int], capability: tuple[int, int] = (8, 9)) -> None:
        self._patch.setattr(torch.cuda, "is_available", lambda: bool(free))
        self._patch.setattr(torch.cuda, "device_count", lambda: len(free))
        self._patch.setattr(torch.cuda, "mem_get_info", lambda i: (free[i], 24 * 10**9))
        self._patch.setattr(torch.cuda, "get_device_name", lambda i: f"NVIDIA X{i}")
        self._patch.setattr(torch.cuda, "get_device_capability", lambda i: capability)
        self._patch.setattr(torch.cuda, "set_device", self.current.append)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def checks(settings: Settings) -> dict[str, Check]:
    return {check.name: check for check in report(settings)}


def test_a_machine_without_a_gpu(machine: Machine, isolated: Settings) -> None:
    found = checks(isolated)
    assert (found["nvidia driver"].status, found["torch"].status) == ("warn", "ok")
    assert "run on the CPU, slowly" in found["nvidia driver"].advice
    assert "no NVIDIA driver answers" in why_no_gpu()
    assert all(check.advice for check in found.values() if check.status != "ok")
    assert not (isolated.cache_dir).exists()  # looking changes nothing


def test_a_cpu_build_of_torch_beside_a_gpu(machine: Machine, isolated: Settings) -> None:
    machine.driver(CARDS)
    found = checks(isolated)
    assert found["nvidia driver"].value == CARDS.replace("\n", "; ")
    assert found["torch"].status == "fail"
    assert "CPU build" in found["torch"].advice
    assert "550.54.15, NVIDIA L4" in found["torch"].advice
    assert "pip install" in found["torch"].advice


def test_a_driver_too_old_for_this_torch(machine: Machine, isolated: Settings) -> None:
    machine.driver("470.82.01, Tesla V100, 16160 MiB")
    machine.cuda("12.8")
    advice = checks(isolated)["torch"].advice
    assert advice == "driver 470.82.01 is too old for CUDA 12.8, which needs 525 or newer: update the driver"


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus(machine: Machine, isolated: Settings, monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    machine.driver(CARDS)
    machine.cuda("12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert f"CUDA_VISIBLE_DEVICES is {hidden!r}, which hides every GPU: unset it" in checks(isolated)["torch"].advice


def test_a_choice_of_gpus_that_names_none_that_exists(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.driver(CARDS)
    machine.cuda("12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    assert "finds no usable GPU under driver 550.54.15" in why_no_gpu()
    assert "CUDA_VISIBLE_DEVICES is '9'" in why_no_gpu()


def test_a_driver_that_does_not_answer(machine: Machine) -> None:
    machine.driver("NVIDIA-SMI has failed", code=9)
    machine.cuda("12.8")
    assert "no NVIDIA driver answers" in why_no_gpu()


def test_gpus_that_work(machine: Machine, isolated: Settings) -> None:
    machine.driver(CARDS)
    machine.cuda("12.8")
    machine.gpus([10**9, 20 * 10**9])
    found = checks(isolated)
    assert found["torch"].status == "ok"
    assert found["cuda:1"].value == "NVIDIA X1, capability 8.9, 20.0 GB free of 24.0 GB"
    machine.gpus([10**9], capability=(7, 5))
    assert checks(isolated)["cuda:0"].status == "warn"


def test_missing_libraries(machine: Machine, isolated: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = checks(isolated)
    assert (found["tokenizers"].status, found["tokenizers"].advice) == ("fail", "pip install tokenizers")
    assert found["triton"].status == "ok"
    assert found["pip"].status == "warn"
    assert "ensurepip" in found["pip"].advice
    machine.driver(CARDS)
    assert checks(isolated)["triton"].status == "warn"


def test_folders(machine: Machine, isolated: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks(isolated)["cache"].value.startswith(str(isolated.cache_dir))
    (tmp_path / "file").touch()
    blocked = checks(replace(isolated, cache_dir=tmp_path / "file" / "cache"))["cache"]
    assert (blocked.status, blocked.advice) == ("fail", "point MINICPM_CACHE_DIR at a folder that can")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))  # type: ignore[attr-defined]
    found = checks(isolated)
    assert (found["cache"].status, found["hub cache"].status) == ("warn", "warn")
    assert "HF_HOME" in found["hub cache"].advice


def test_a_torch_that_does_not_import(machine: Machine, isolated: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch", None)
    found = checks(isolated)["torch"]
    assert found.status == "fail"
    assert "cannot be imported" in found.value


def test_the_device_with_most_free_memory(machine: Machine) -> None:
    machine.gpus([5, 9, 7])
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", 1)
    assert choose_device("cuda:2") == torch.device("cuda", 2)
    assert choose_device("cpu") == torch.device("cpu")
    assert machine.current == [1, 1, 2], "what launches kernels past torch launches them there"


def test_the_cpu_only_where_there_is_no_gpu(machine: Machine) -> None:
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(DeviceError, match=r"--device cuda: .*no NVIDIA driver answers.*minicpm doctor") as caught:
        choose_device("cuda")
    assert caught.value.exit_code == 4


def test_a_gpu_that_does_not_exist(machine: Machine) -> None:
    machine.gpus([5, 9])
    with pytest.raises(
        DeviceError, match=r"cuda:7 does not exist. There are: cuda:0 \(NVIDIA X0\), cuda:1 \(NVIDIA X1\)"
    ):
        choose_device("cuda:7")


@pytest.mark.parametrize(("capability", "fits"), [((7, 5), True), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_an_fp8_cache_needs_a_gpu_that_converts_it(
    capability: tuple[int, int], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "triton_compiles", lambda _: capability >= (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA X")
    device = torch.device("cuda", 0)
    check_cache("int8", device)
    check_cache("fp8", torch.device("cpu"))
    if fits:
        check_cache("fp8", device)
    else:
        with pytest.raises(DeviceError, match=r"NVIDIA X cannot convert fp8\. Take --kv-dtype int8\."):
            check_cache("fp8", device)


def test_the_cpus_flags(machine: Machine, isolated: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_cpu_flags", lambda: {"avx2", "avx512_bf16", "sse", "amx_bf16"})
    assert checks(isolated)["cpu"].value.endswith("threads, avx2 avx512_bf16 amx_bf16")
