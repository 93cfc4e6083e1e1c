"""`minicpm plan`: what it counts, what it says of what does not fit, and that nothing is loaded for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints import write_checkpoint
from minicpm_cli.cli.plan import free_size
from minicpm_cli.engine.memory_ledger import Kind, Measured, record
from minicpm_cli.errors import UsageError
from minicpm_cli.llm.checkpoint import Checkpoint
from minicpm_cli.model.kv_format import KVFormat

GB = 10**9


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", "minicpm-1b", layers=2, fmt="safetensors")


def record_of(cli, *arguments: str, code: int = 0) -> dict:
    done = cli("plan", "--json", *arguments)
    assert done.code == code, done.err
    return json.loads(done.out)


def test_numbers_are_those_of_the_files(cli, model: Path) -> None:
    found, cfg = record_of(cli, "-m", str(model), "--free", "8GB"), Checkpoint.read(model).cfg
    assert found["weight_bytes"] == 2 * cfg.parameters
    assert found["stored_bytes"] == {"BF16": 2 * cfg.parameters}
    assert found["kv_bytes_per_token"] == cfg.kv_bytes_per_token(2)
    assert (found["free_bytes"], found["budget_bytes"], found["fetch_bytes"]) == (8 * GB, 7.2 * GB, 0)
    assert found["fits"]
    assert found["largest_context"] > cfg.context
    assert found["quantize"]["device_bytes"] > 0


def test_the_model_may_be_an_argument_or_an_option(cli, model: Path) -> None:
    first = cli("plan", str(model), "--free", "8GB")
    assert first.code == 0
    assert first.out == cli("plan", "--model", str(model), "--free", "8e9").out
    assert not first.opened
    rows = dict(line.split("\t", 1) for line in first.out.splitlines())
    assert rows["verdict"].startswith("fits: ")
    assert "BF16" in rows["files"]


@pytest.mark.parametrize("option", ["-m", "--model-path"])
def test_two_different_models_are_refused(cli, model: Path, option: str) -> None:
    done = cli("plan", str(model), option, "other", "--free", "8GB")
    assert done.code == 2
    assert str(model) in done.err
    assert "other" in done.err
    assert cli("plan", str(model), option, str(model), "--free", "8GB").code == 0


def test_options_change_what_is_counted(cli, model: Path) -> None:
    plain = record_of(cli, str(model), "--free", "8GB")
    eight = record_of(cli, str(model), "--free", "8GB", "--quantize", "w8")
    assert eight["weight_bytes"] < plain["weight_bytes"]
    assert eight["scheme"] == "w8 row sym"
    wide = record_of(cli, str(model), "--free", "8GB", "--dtype", "fp32")
    assert wide["weight_bytes"] == 2 * plain["weight_bytes"]
    few = record_of(cli, str(model), "--free", "8GB", "--max-seqs", "2", "--ctx", "1024")
    assert (few["max_seqs"], few["context"], few["cache_tokens"]) == (2, 1024, 2048)
    assert few["workspace_bytes"]["decode"] < plain["workspace_bytes"]["decode"]


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_a_cache_of_codes_is_counted_with_its_scales(cli, model: Path, kv_dtype: str, monkeypatch) -> None:
    monkeypatch.setenv("MINICPM_KV_DTYPE", kv_dtype)
    found = record_of(cli, str(model), "--free", "8GB")
    assert found["kv_dtype"] == kv_dtype
    assert found["kv_bytes_per_token"] == KVFormat(kv_dtype).bytes_per_token(Checkpoint.read(model).cfg)  # type: ignore[arg-type]


def test_what_does_not_fit_is_told_in_numbers_with_exit_code_4(cli, model: Path) -> None:
    done = cli("plan", str(model), "--free", "2GB", "--ctx", "90000000")
    assert done.code == 4
    assert done.err.startswith("minicpm: a context of 90000000 tokens does not fit: ")
    assert "What would fit: a cache of" in done.err
    found = record_of(cli, str(model), "--free", "2GB", "--ctx", "90000000", code=4)
    assert (found["fits"], found["context"]) == (False, 90_000_000), "what was asked for is never shrunk"
    assert cli("plan", str(model), "--free", "300MB").code == 4


def test_past_errors_are_shown_for_the_same_kind(cli, model: Path, home: Path) -> None:
    cfg = Checkpoint.read(model).cfg
    shape = f"{cfg.architecture} {cfg.layers}x{cfg.hidden_size}/{cfg.intermediate}"
    kind = Kind(shape, "bf16", "bf16", "another device")
    record(
        home / "cache", [Measured(kind, "decode", 900, 1000, 1000, 1, 1, 1), Measured(kind, "fixed", 1, 77, 1, 1, 1, 1)]
    )
    done = cli("plan", str(model), "--free", "8GB")
    assert "past error, decode\t-10.0% on average" in done.out
    found = record_of(cli, str(model), "--free", "8GB")
    assert found["fixed_bytes"] == 77
    assert found["past"][0] | {"count": 1, "worst_bytes": -100} == found["past"][0]


@pytest.mark.parametrize("fmt", ["gguf", "bin"])
def test_other_formats(cli, tmp_path: Path, fmt: str) -> None:
    path = write_checkpoint(tmp_path / "other", "minicpm-1b", layers=2, fmt=fmt)
    found = record_of(cli, str(path), "--free", "8GB")
    assert found["weight_bytes"] == pytest.approx(2 * found["parameters"], rel=0.01)
    assert bool(found["stored_bytes"]) == (fmt == "gguf")


def test_torn_files_and_wrong_values(cli, model: Path) -> None:
    file = next(model.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])
    assert cli("plan", str(model), "--free", "8GB").code == 3
    assert cli("plan", str(model), "--free", "much").code == 2
    assert cli("plan", "nowhere/at-all/x", "--free", "8GB").code == 3


def test_here_and_now(cli, model: Path) -> None:
    found = record_of(cli, str(model), "--device", "cpu", "--max-seqs", "1", "--ctx", "512")
    assert found["device"] == "cpu"
    assert 0 < found["free_bytes"] <= found["total_bytes"]
    assert "capture" not in found["peak_bytes"]


def test_nothing_is_loaded_or_run(model: Path) -> None:
    """What runs a model is not even imported."""
    code = (
        "import sys; from minicpm_cli.cli import exit_code; from minicpm_cli.cli.runtime import Runtime\n"
        f"assert exit_code(['plan', {str(model)!r}, '--free', '8GB'], Runtime()) == 0\n"
        "heavy = {'transformers', 'triton', 'minicpm_cli.llm.llm', 'minicpm_cli.engine.engine'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("text", "count"),
    [("1000", 1000), ("24GB", 24 * GB), ("1.5 GiB", 3 << 29), ("8e9", 8 * GB), ("200mb", 200_000_000)],
)
def test_sizes(text: str, count: int) -> None:
    assert free_size(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-1", "1TB", "nan", "1,5GB", "1e999GB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="--free"):
        free_size(text)
