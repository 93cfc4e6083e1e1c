"""A shape as a model: opened by the size that fits, and written to a folder that everything else can load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minicpm_cli.bench import folder, shapes
from minicpm_cli.bench.command import BenchOptions, run_bench
from minicpm_cli.bench.folder import write_folder
from minicpm_cli.bench.subject import open_subject
from minicpm_cli.bench.weights import RandomSource
from minicpm_cli.errors import DeviceError
from minicpm_cli.fleet.fleet import Fleet
from minicpm_cli.llm.checkpoint import Checkpoint
from minicpm_cli.model.shapes import tensor_shapes
from minicpm_cli.settings import LoadOptions, Settings
from minicpm_cli.text.tokenizer import load_tokenizer
from minicpm_cli.types import SamplingParams

CPU = torch.device("cpu")
TINY = dict(shapes.SHAPES["minicpm5-1b"]) | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 512,
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "SHAPES", {"tiny": TINY})


def settings() -> Settings:
    return Settings.load(environ={})


def test_an_engine_of_a_shape_has_the_seats_that_a_user_gets() -> None:
    options = LoadOptions(device="cpu", dtype="fp32")
    runner = open_subject(options, "tiny", settings()).runner()
    config = runner._engine.config  # type: ignore[attr-defined]
    assert (config.max_seqs, config.max_batch_tokens, config.context) == (4, 512, 512)
    run = runner.run([(1, 2, 3)] * 6, SamplingParams(temperature=0.8, top_p=0.8, max_tokens=5))
    assert (run.prompt_tokens, run.new_tokens) == (18, 30)


@pytest.mark.parametrize(
    ("changes", "scheme"),
    [
        ({}, "fp32"),
        ({"quantize": "w4", "head_bits": 8}, "w4 g64/g128 asym, head w8"),
        ({"graphs": False}, "fp32, no graphs"),
        ({"kv_dtype": "fp8", "max_seqs": 256}, "fp32, fp8 KV, 256 seats"),
    ],
)
def test_what_changes_the_numbers_is_in_the_scheme(changes: dict[str, Any], scheme: str) -> None:
    subject = open_subject(LoadOptions(device="cpu", dtype="fp32", **changes), "tiny", settings())
    assert subject.setting().scheme == scheme


def test_a_benchmark_takes_the_threads_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    options = LoadOptions(device="cpu", dtype="fp32")
    open_subject(options, "tiny", settings())
    open_subject(options, "tiny", Settings.load(environ={"MINICPM_THREADS": "3"}))
    assert taken == [3]


def test_a_folder_holds_the_same_weights_and_a_word_for_every_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "SHARD_WEIGHTS", 30_000)
    write_folder(tmp_path, "tiny", CPU)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    checkpoint = Checkpoint.read(tmp_path)
    decoder = checkpoint.decoder(CPU, torch.bfloat16)
    source = RandomSource(checkpoint.cfg, device=CPU, dtype=torch.bfloat16)
    shape = tensor_shapes(checkpoint.cfg)["model.embed_tokens.weight"]
    assert torch.equal(decoder.embed(torch.arange(300)), source.take("model.embed_tokens.weight", shape))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 300
    assert all(tokenizer.piece(ident) for ident in range(300))
    assert tokenizer.decode(tokenizer.encode("Name three colours.", control=False)) == "Name three colours."


def test_the_start_of_a_shape_is_timed_from_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []

    def start(name: str, model: str, repeats: int, flags: list[str]) -> tuple[float, ...]:
        assert Checkpoint.read(Path(model)).cfg.vocab == 300
        seen.append(Path(model))
        return (1.5,) * repeats

    monkeypatch.setattr("minicpm_cli.bench.command.measure_start", start)
    options = BenchOptions(LoadOptions(device="cpu"), "tiny", ("load",))
    (row,) = run_bench(options, settings())
    assert (row.workload, row.value, row.unit, row.setting.model) == ("load", 1.5, "s", "tiny")
    assert not seen[0].exists()


@pytest.mark.parametrize("graphs", [True, False])
def test_the_engine_is_the_one_that_was_asked_for(graphs: bool) -> None:
    runner = open_subject(
        LoadOptions(device="cpu", dtype="fp32", graphs=graphs, max_seqs=3), "tiny", settings()
    ).runner()
    config = runner._engine.config  # type: ignore[attr-defined]
    assert (config.graphs, config.max_seqs) == (graphs, 3)


@pytest.mark.parametrize(
    ("devices", "told"), [((), "fp32"), (("cpu",), "fp32, 1 worker"), (("cpu",) * 2, "fp32, 2 workers")]
)
def test_several_engines_are_told(devices: tuple[str, ...], told: str) -> None:
    subject = open_subject(LoadOptions(device="cpu", dtype="fp32"), "tiny", settings())
    assert subject.setting(devices).scheme == told


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> BenchOptions:
    """Throughput of two engines whose context its requests fit into."""
    monkeypatch.setattr(shapes, "SHAPES", {"tiny": TINY | {"max_position_embeddings": 1024}})
    load = LoadOptions(device="cpu", dtype="fp32")
    return BenchOptions(load, "tiny", ("throughput",), requests=3, devices=("cpu", "cpu"))


def test_several_engines_are_several_processes(two: BenchOptions, isolated: Settings) -> None:
    (row,) = run_bench(two, isolated)
    assert (row.setting.scheme, row.workload) == ("fp32, 2 workers", "throughput-3")
    assert row.value > 0


def test_fewer_engines_than_asked_for_are_no_measurement(
    two: BenchOptions, isolated: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fleet, "gather", lambda _: 1)
    with pytest.raises(DeviceError, match="1 of 2 workers could not load the model; not measured"):
        run_bench(two, isolated)
