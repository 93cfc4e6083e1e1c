"""Quantized models as a user meets them: loaded, named, planned, refused with the right exit code."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from checkpoint_quantized import RECIPES, set_config, write_quantized
from checkpoints import write_checkpoint
from minicpm_cli.bench.subject import open_subject
from minicpm_cli.cli import exit_code
from minicpm_cli.cli.runtime import Runtime
from minicpm_cli.errors import UsageError, WeightsError
from minicpm_cli.llm.checkpoint import Checkpoint
from minicpm_cli.settings import LoadOptions, Settings

FAMILY = "minicpm5-1b"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name in ("gptq", "gptq-asym", "nf4", "gptq-head"):
        write_quantized(root / name, FAMILY, RECIPES[name])
    unsaid = {k: v for k, v in RECIPES["gptq-asym"].config.items() if k != "checkpoint_format"}
    set_config(root / "gptq-asym", quantization_config=unsaid)
    write_checkpoint(root / "plain", FAMILY, fmt="safetensors")
    q8 = write_checkpoint(root / "gguf", FAMILY, fmt="gguf", quant="Q8_0")
    return {path.name: path for path in root.iterdir()} | {"gguf": q8}


@pytest.fixture
def minicpm(monkeypatch: pytest.MonkeyPatch, isolated: Settings):  # type: ignore[no-untyped-def]
    """minicpm(*arguments) -> (exit code, stdout, stderr), with real models."""

    def call(*arguments: str) -> tuple[int, str, str]:
        streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n") for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setenv("MINICPM_DEVICE", "cpu")
            patch.setenv("MINICPM_CTX", "128")
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
            patch.setattr(sys, "stdout", streams[0])
            patch.setattr(sys, "stderr", streams[1])
            code = exit_code(arguments, Runtime())
        for stream in streams:
            stream.flush()
        out, err = (stream.buffer.getvalue().decode() for stream in streams)  # type: ignore[attr-defined]
        return code, out, err

    return call


@pytest.mark.parametrize(
    ("model", "flags", "scheme"),
    [
        ("gptq", (), "gptq w4 g32 sym on cpu"),
        ("gptq-asym", ("--gptq-format", "v1"), "gptq w4 g32 asym on cpu"),
        ("nf4", (), "bitsandbytes nf4 on cpu"),
        ("gptq", ("--head-bits", "8"), "gptq w4 g32 sym, head w8 on cpu"),
        ("gptq-head", ("--head-bits", "8"), "gptq w4 g32 sym on cpu"),
        ("plain", ("--quantize", "w4", "--head-bits", "8"), "w4 g64/g128 asym, head w8 on cpu"),
        ("plain", ("--quantize", "int8"), "int8 on cpu"),
        ("gguf", ("--head-bits", "8"), "Q8_0 on cpu"),
    ],
)
def test_it_answers_and_says_how_it_is_packed(
    minicpm, folders, model: str, flags: tuple[str, ...], scheme: str
) -> None:
    code, _, err = minicpm("run", "-v", "-m", str(folders[model]), *flags, "-n", "4", "--seed", "1", "hello")
    assert (code, f", {scheme}" in err, " 4 out" in err) == (0, True, True), err
    assert ("quantized while loading" in err) == ("--quantize" in flags)


@pytest.mark.parametrize(
    ("model", "flags", "code", "message"),
    [
        ("gptq", ("--quantize", "w4"), 2, "is quantized already (gptq w4 g32 sym): leave --quantize w4 out"),
        ("gguf", ("--quantize", "nf4"), 2, "is quantized already (Q8_0)"),
        ("plain", ("--gptq-format", "v1"), 2, "--gptq-format v1 is for GPTQ checkpoints"),
        ("gguf", ("--gptq-format", "v1"), 2, "--gptq-format v1 is for GPTQ checkpoints"),
        ("plain", ("--quantize", "w3"), 2, "w4, w8, nf4, int8, fp8"),
        ("plain", ("--head-bits", "6"), 2, "4, 8 or 16"),
        ("gptq-asym", (), 3, "Give --gptq-format v1"),
    ],
)
def test_refusals_have_their_exit_code(
    minicpm, folders, model: str, flags: tuple[str, ...], code: int, message: str
) -> None:
    got, out, err = minicpm("run", "-m", str(folders[model]), *flags, "hello")
    assert (got, out, message in err) == (code, "", True), err
    assert "Traceback" not in err


def test_a_damaged_file_is_3(minicpm, folders, tmp_path: Path) -> None:
    write_quantized(tmp_path / "torn", FAMILY, RECIPES["gptq"])
    file = tmp_path / "torn" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1024])
    code, _, err = minicpm("run", "-m", str(tmp_path / "torn"), "hello")
    assert (code, "model.safetensors: expects" in err) == (3, True), err


def test_a_plan_does_not_believe_a_config_that_the_files_refute(tmp_path: Path) -> None:
    """From the headers alone: nothing that will not load is said to fit."""
    folder = write_checkpoint(tmp_path / "m", "minicpm5-1b", fmt="safetensors")
    set_config(folder, quantization_config=RECIPES["gptq"].config)
    with pytest.raises(WeightsError, match="but the files hold plain tensors"):
        Checkpoint.read(folder).weight_bytes(2)


def test_the_plan_knows_what_is_packed(folders) -> None:
    plain = Checkpoint.read(folders["plain"])
    full = plain.weight_bytes(2)
    linear = full - 2 * 2 * 416 * 192  # without embedding and head
    gptq = Checkpoint.read(folders["gptq"])
    assert gptq.weight_bytes(2) == pytest.approx(full - linear + linear * 4.625 / 16, rel=0.02)
    eight = plain.with_options(LoadOptions(quantize="int8", head_bits=8))
    assert eight.weight_bytes(2) == pytest.approx(full - (linear + 2 * 416 * 192) / 2, rel=0.04)
    packed = Checkpoint.read(folders["gguf"])
    assert packed.weight_bytes(4, cpu=True) == pytest.approx(2 * full, rel=0.01), "in float32 nothing stays packed"
    assert packed.weight_bytes(2) == pytest.approx(full * 8.5 / 16, rel=0.01)


def test_bench_measures_what_it_says(folders, isolated: Settings) -> None:
    load = LoadOptions(model=str(folders["plain"]), device="cpu", quantize="w4", head_bits=8)
    subject = open_subject(load, None, isolated)
    assert subject.setting().scheme == "w4 g64/g128 asym, head w8"
    decoder = subject.checkpoint.decoder(subject.device, subject.dtype)
    assert decoder.weight_bytes < Checkpoint.read(folders["plain"]).weight_bytes(2)
    shape = open_subject(LoadOptions(device="cpu", quantize="fp8"), "minicpm4-0.5b", isolated)
    assert shape.setting().scheme == "fp8"
    with pytest.raises(UsageError, match="quantized already"):
        open_subject(LoadOptions(model=str(folders["gptq"]), device="cpu", quantize="w4"), None, isolated)
