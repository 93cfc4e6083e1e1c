"""A hub model's sizes come from its headers: by range requests, without its weights, and nothing stays in the cache."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from fake_hub import COMMIT, FakeHub
from tiny_repo import REPO

from checkpoints import write_checkpoint
from minicpm_cli.cli import exit_code
from minicpm_cli.cli.runtime import Runtime
from minicpm_cli.errors import ModelNotFound, WeightsError
from minicpm_cli.hub import headers, resolve
from minicpm_cli.llm.checkpoint import Checkpoint
from minicpm_cli.settings import Settings


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of MiniCPM-1B's true width, 97 MB in shards."""
    return write_checkpoint(tmp_path_factory.mktemp("whole"), "minicpm-1b", fmt="sharded", layers=2, exact=True)


@pytest.fixture
def published(hub: FakeHub, whole: Path) -> Path:
    """The model in the hub, and here."""
    hub.files = {file.name: file.read_bytes() for file in whole.iterdir() if file.is_file()}
    return whole


def test_headers_are_enough_to_weigh_a_model(hub: FakeHub, published: Path, isolated: Settings) -> None:
    with headers(REPO, isolated) as (files, fetch):
        found, whole = Checkpoint.read(files.path), Checkpoint.read(published)
        assert (files.name, files.revision) == (REPO, COMMIT)
        assert found.cfg == whole.cfg
        assert found.stored() == whole.stored()
        assert found.weight_bytes(2) == whole.weight_bytes(2) > 90 << 20
        assert fetch > 90 << 20
        folder = files.path
    assert not folder.exists()


def test_no_more_than_headers_is_asked_for(hub: FakeHub, published: Path, isolated: Settings, tmp_path: Path) -> None:
    with headers(REPO, isolated):
        pass
    asked = sum(int(wanted.partition("-")[2]) + 1 for wanted in hub.ranges)
    assert len(hub.ranges) == len(hub.fetched())
    assert asked < 1 << 20
    assert not any(name.startswith("tokenizer") for name in hub.fetched())
    assert not list((tmp_path / "hub").glob("models--*"))


def test_a_server_that_sends_everything_is_hung_up_on(hub: FakeHub, published: Path, isolated: Settings) -> None:
    hub.ignores_ranges = True
    with headers(REPO, isolated) as (files, _):
        assert Checkpoint.read(files.path).weight_bytes(2) == Checkpoint.read(published).weight_bytes(2)


def test_long_headers_take_a_second_request(hub: FakeHub, published: Path, isolated: Settings) -> None:
    name = next(n for n in hub.files if n.endswith(".safetensors"))
    length = struct.unpack("<Q", hub.files[name][:8])[0]
    header = json.loads(hub.files[name][8 : 8 + length])
    longer = json.dumps(header | {"__metadata__": {"note": "x" * 100_000}}).encode()
    hub.files[name] = struct.pack("<Q", len(longer)) + longer + hub.files[name][8 + length :]
    with headers(REPO, isolated) as (files, _):
        assert Checkpoint.read(files.path).weight_bytes(2) == Checkpoint.read(published).weight_bytes(2)
    assert f"bytes=0-{8 + len(longer) - 1}" in hub.ranges


def test_a_model_that_is_here_needs_no_hub(hub: FakeHub, published: Path, isolated: Settings) -> None:
    resolve(REPO, isolated)
    hub.status, hub.requests = 500, []
    with headers(REPO, isolated) as (files, fetch):
        assert (fetch, files.path.name, hub.requests) == (0, COMMIT, [])
    with headers(str(published), isolated) as (files, fetch):
        assert (files.path, fetch) == (published, 0)


def test_a_gguf_of_the_hub(hub: FakeHub, isolated: Settings, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "source", "minicpm-1b", fmt="gguf", layers=2)
    file = path if path.is_file() else next(path.glob("*.gguf"))
    hub.files = {file.name: file.read_bytes()}
    with headers(f"{REPO}/{file.name}", isolated) as (files, fetch):
        assert fetch == file.stat().st_size
        assert Checkpoint.read(files.path).weight_bytes(2) == Checkpoint.read(file).weight_bytes(2)


def test_faults_have_their_names(hub: FakeHub, published: Path, isolated: Settings, monkeypatch) -> None:
    name = next(n for n in hub.files if n.endswith(".safetensors"))
    hub.cuts[name] = 9
    with pytest.raises((WeightsError, ModelNotFound)), headers(REPO, isolated):
        pass
    hub.cuts.clear()
    hub.files[name] = struct.pack("<Q", 1 << 40) + hub.files[name][8:]
    with pytest.raises(WeightsError, match=rf"header of {name} expects 1099511627784 bytes"), headers(REPO, isolated):
        pass
    with pytest.raises(ModelNotFound, match="does not exist"), headers("nobody/nothing", isolated):
        pass
    hub.token = "secret"
    with pytest.raises(ModelNotFound, match="gated"), headers(REPO, isolated):
        pass
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match="HF_HUB_OFFLINE"), headers(REPO, isolated):
        pass


def test_the_command_plans_a_model_that_was_never_fetched(
    hub: FakeHub, published: Path, isolated: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(["plan", REPO, "--json", "--free", "8GB"], Runtime()) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["fetch_bytes"] > 90 << 20
    assert record["weight_bytes"] == Checkpoint.read(published).weight_bytes(2)
    assert exit_code(["plan", REPO, "--free", "100MB"], Runtime()) == 4
    assert "to fetch" in capsys.readouterr().out
