"""LoRA adapters by the ids of their repositories."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_hub import COMMIT, FakeHub
from tiny_repo import REPO

from minicpm_cli.cli.runtime import Invocation, Runtime
from minicpm_cli.errors import ModelNotFound, WeightsError
from minicpm_cli.hub import adapter, pull, resolve
from minicpm_cli.settings import Settings

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"lora" * 2000, "adapter_model.bin": b"pickle"}


@pytest.fixture
def lora(hub: FakeHub) -> FakeHub:
    hub.files = {**FILES, "README.md": b"", "checkpoint-5/adapter_model.safetensors": b"earlier", "train.py": b"x"}
    return hub


def test_only_what_an_adapter_needs_is_fetched_and_only_once(lora: FakeHub, isolated: Settings) -> None:
    folder = adapter(REPO)
    assert folder.name == COMMIT
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert (folder / "adapter_model.safetensors").read_bytes() == FILES["adapter_model.safetensors"]
    before = len(lora.requests)
    assert adapter(REPO) == folder
    assert len(lora.requests) == before, "it is here"


def test_pytorchs_own_format_where_there_is_no_other(lora: FakeHub, isolated: Settings) -> None:
    del lora.files["adapter_model.safetensors"]
    assert (adapter(REPO) / "adapter_model.bin").is_file()


def test_one_that_broke_off_is_fetched_again(lora: FakeHub, isolated: Settings) -> None:
    folder = adapter(REPO)
    (folder / "adapter_model.safetensors").unlink()
    assert (adapter(REPO) / "adapter_model.safetensors").is_file()


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert adapter(str(tmp_path)) == tmp_path


def test_what_is_none(hub: FakeHub, isolated: Settings) -> None:
    with pytest.raises(ModelNotFound, match="is no LoRA adapter"):
        adapter(REPO)
    with pytest.raises(ModelNotFound, match="does not exist"):
        adapter("nobody/nothing")


def test_an_adapter_that_is_taken_for_a_model(lora: FakeHub, isolated: Settings) -> None:
    with pytest.raises(ModelNotFound, match=f"not a model: give its model with -m, and --lora {REPO}"):
        resolve(REPO, isolated)


def test_pull_fetches_it_again_and_checks_it(lora: FakeHub, isolated: Settings) -> None:
    files = pull(REPO, isolated)
    assert (files.path / "adapter_model.safetensors").is_file()
    (files.path / "adapter_model.safetensors").resolve().write_bytes(b"lord" * 2000)
    with pytest.raises(WeightsError, match="is damaged"):
        pull(REPO, isolated)


def test_commands_that_load_get_its_folder(lora: FakeHub, isolated: Settings) -> None:
    invocation = Invocation(Runtime())
    settings = invocation.configure({"lora": REPO})
    assert settings.options.lora is not None
    assert Path(settings.options.lora).name == COMMIT
    assert settings.origin("lora") == "flag --lora"
    served = invocation.configure({"lora": REPO, "server": "http://127.0.0.1:1"})
    assert served.options.lora == REPO, "a server has what it was started with"
