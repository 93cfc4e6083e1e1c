"""--lora on the command line: what it answers, what names it, and what goes on only with the same one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters import set_keys, write_adapter
from checkpoints import checkpoint_config, state_dict, tensor_shapes, write_checkpoint
from fakes import FakeLLM
from minicpm_cli.bench import heldout
from minicpm_cli.cli.opening import open_llm, open_prompts
from minicpm_cli.cli.runtime import Runtime
from minicpm_cli.llm.info import LLMInfo
from minicpm_cli.model.lora_files import identity
from minicpm_cli.quantize.tensors import read_tensors

FAMILY, TARGETS = "minicpm5-1b", ("q_proj", "v_proj", "down_proj")
LINES = b'{"prompt": "one"}\n{"prompt": "two"}\n'


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", FAMILY, fmt="safetensors", dtype=torch.float32)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "adapter", tensor_shapes(checkpoint_config(FAMILY)), TARGETS, alpha=64)
    return tmp_path / "adapter"


@pytest.fixture
def real(cli: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command line with real models."""

    def call(*arguments: str, **more: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(Runtime, "__init__", _real)
            return cli(*arguments, **more)

    return call


def _real(self: Runtime, **ignored: Any) -> None:
    object.__setattr__(self, "open_llm", open_llm)
    object.__setattr__(self, "open_prompts", open_prompts)


def ask(real: Any, model: Path, *more: str) -> Any:
    common = ("-m", str(model), "--device", "cpu", "--dtype", "fp32", "-t", "0", "-n", "12", "--ctx", "64", "--json")
    return real("run", *common, *more, "hello world")


def test_run_answers_as_the_merged_model(real: Any, model: Path, adapter: Path, tmp_path: Path) -> None:
    merged = write_checkpoint(tmp_path / "merged", FAMILY, fmt="safetensors", dtype=torch.float32)
    _merge(merged, adapter)
    with_it, without, whole = ask(real, model, "--lora", str(adapter)), ask(real, model), ask(real, merged)
    assert with_it.code == 0, with_it.err
    assert said(with_it) == said(whole)
    assert said(with_it) != said(without)
    assert f"lora r8 {identity(adapter)['sha256'][:8]}" in ask(real, model, "--lora", str(adapter), "-v").err


def said(result: Any) -> tuple[str, str]:
    record = json.loads(result.out)
    return record["text"], record["think"]


def _merge(folder: Path, adapter: Path) -> None:
    from safetensors.torch import save_file

    deltas = write_adapter(adapter, tensor_shapes(checkpoint_config(FAMILY)), TARGETS, alpha=64)
    state = state_dict(FAMILY, dtype=torch.float32)
    save_file({n: (t.double() + deltas.get(n, 0)).float() for n, t in state.items()}, folder / "model.safetensors")


def test_another_models_adapter_is_refused_before_the_load(real: Any, model: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "other", tensor_shapes(checkpoint_config("minicpm4-0.5b")), TARGETS)
    result = ask(real, model, "--lora", str(tmp_path / "other"))
    assert result.code == 3
    assert result.out == ""
    assert "The adapter was trained on another model" in result.err


def test_an_adapter_of_another_name_is_told(real: Any, model: Path, adapter: Path) -> None:
    set_keys(adapter, base_model_name_or_path="openbmb/Other-7B")
    assert "trained on openbmb/Other-7B; its shapes fit this model, too" in ask(real, model, "--lora", str(adapter)).err


def test_no_adapter_at_all_can_be_asked_for(cli: Any, home: Path, adapter: Path) -> None:
    (home / "config.toml").write_text(f'lora = "{adapter}"\n')
    assert cli("config", "get", "lora").out == f"{adapter}\n"
    assert cli("run", "--lora", "none", "hello").code == 0
    assert cli("run", "--lora", str(home / "nowhere"), "hello").code == 2


def test_plan_counts_it(cli: Any, model: Path, adapter: Path) -> None:
    record = json.loads(cli("plan", str(model), "--device", "cpu", "--lora", str(adapter), "--json").out)
    assert record["scheme"].startswith("bf16, lora r8 ")
    packed = json.loads(cli("plan", str(model), "--device", "cpu", "--json").out)
    assert record["weight_bytes"] == packed["weight_bytes"], "it is merged"
    assert record["workspace_bytes"]["load"] > packed["workspace_bytes"]["load"]


@pytest.mark.parametrize("change", ["path", "content", "none"])
def test_a_batch_goes_on_with_the_same_adapter_only(
    cli: Any, model: Path, adapter: Path, tmp_path: Path, change: str
) -> None:
    (tmp_path / "in.jsonl").write_bytes(LINES)
    arguments = ("batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "-m", str(model))
    assert cli(*arguments, "--lora", str(adapter)).code == 0
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert manifest["model"]["lora"] == str(adapter)
    assert manifest["files"]["lora"] == identity(adapter)["sha256"]
    assert cli(*arguments, "--lora", str(adapter)).code == 0
    other: tuple[str, ...] = ("--lora", str(adapter))
    if change == "path":
        other = ("--lora", str(adapter.rename(tmp_path / "moved")))
    elif change == "content":
        set_keys(adapter, lora_alpha=3)
    else:
        other = ()
    result = cli(*arguments, *other)
    assert result.code == 2
    assert "lora was" in result.err


def adapted(path: Path) -> FakeLLM:
    """Says that it was loaded with the adapter."""

    class Adapted(FakeLLM):
        @property
        def info(self) -> LLMInfo:
            return replace(super().info, adapter=digest)

    digest = identity(path)["sha256"]
    return Adapted()


def test_a_conversation_goes_on_with_its_adapter(cli: Any, adapter: Path) -> None:
    assert cli("run", "--lora", str(adapter), "hello", llm=adapted(adapter)).code == 0
    assert cli("run", "-c", "and again", llm=adapted(adapter)).code == 0, "the session names it"
    set_keys(adapter, lora_alpha=3)
    changed = cli("run", "-c", "and now", llm=adapted(adapter))
    assert changed.code == 2
    assert f"with the LoRA adapter {adapter} of sha256" in changed.err
    assert cli("run", "-c", "--lora", "none", "without").code == 0


def test_a_chat_goes_on_with_its_adapter(cli: Any, adapter: Path) -> None:
    chat = ("chat", "-q", "--session", "one")
    assert cli(*chat, "--lora", str(adapter), stdin=b"hello\n", llm=adapted(adapter)).code == 0
    refused = cli(*chat, stdin=b"again\n")
    assert refused.code == 2
    assert "and now there is none. Give --lora DIR, or --lora none, to go on so." in refused.err
    assert cli(*chat, "--lora", "none", stdin=b"again\n").code == 0


def test_a_server_has_no_adapter_of_ours(cli: Any, home: Path, adapter: Path) -> None:
    served = ("run", "--server", "http://127.0.0.1:1/v1")
    (home / "config.toml").write_text(f'lora = "{adapter}"\n')
    assert cli(*served, "hello").code == 0
    assert cli(*served, "-c", "again").code == 0


def test_quantize_merges_before_it_rounds(
    cli: Any, model: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heldout, "text", lambda: "hello world and the others " * 3000)
    monkeypatch.setattr(heldout, "SIZE", 32)
    common = ("--method", "rtn", "--group-size", "32", "--device", "cpu")
    result = cli("quantize", str(model), str(tmp_path / "out"), "--lora", str(adapter), *common)
    assert result.code == 0, result.err
    assert "was merged before anything was quantized" in result.err
    merged = write_checkpoint(tmp_path / "merged", FAMILY, fmt="safetensors", dtype=torch.float32)
    _merge(merged, adapter)
    assert cli("quantize", str(merged), str(tmp_path / "whole"), "--no-evaluate", *common).code == 0
    ours, theirs = (_tensors(tmp_path / name) for name in ("out", "whole"))
    assert ours.keys() == theirs.keys()
    same = [torch.equal(ours[name], theirs[name]) for name in ours]
    assert sum(same) >= len(same) - 2, "float32's last bit may round a code to its neighbour"


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    from minicpm_cli.llm.checkpoint import Checkpoint

    cfg = Checkpoint.read(folder).cfg
    return read_tensors(folder, cfg, tensor_shapes(checkpoint_config(FAMILY)))


def test_a_quantization_goes_on_with_the_same_adapter_only(
    cli: Any, model: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minicpm_cli.quantize import run

    def stop(*ignored: Any) -> None:
        raise KeyboardInterrupt

    arguments = ("quantize", str(model), str(tmp_path / "out"), "--method", "rtn", "--device", "cpu", "--no-evaluate")
    with monkeypatch.context() as patch:
        patch.setattr(run.output, "assemble", stop)
        assert cli(*arguments, "--lora", str(adapter)).code == 130
    assert cli(*arguments).code == 2
    assert cli(*arguments, "--lora", str(adapter)).code == 0


def test_eval_compares_with_the_model_without_it(
    real: Any, model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heldout, "text", lambda: "hello world and the others " * 3000)
    common = ("--device", "cpu", "--window", "32", "--max-windows", "2", "--json")
    found = json.loads(real("eval", str(model), "--lora", str(adapter), "--against", str(model), *common).out)
    assert found["kl"] > 0.01
    assert "lora r8" in json.dumps(found)


def test_bench_measures_with_it(real: Any, model: Path, adapter: Path) -> None:
    refused = real("bench", "--shape", "minicpm4-0.5b", "--lora", str(adapter))
    assert refused.code == 2
    assert "--lora has no place beside random weights" in refused.err
