"""Which model a name stands for: it changes when the model does, and costs no network and no reading of weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fake_hub import COMMIT, FakeHub
from tiny_repo import REPO

from minicpm_cli.hub import cache, demo, identify, resolve
from minicpm_cli.hub.contents import RepoName
from minicpm_cli.settings import Settings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "m"
    path.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "README.md"):
        (path / name).write_text("{}")
    return path


def test_a_hub_model_is_its_commit(hub: FakeHub, isolated: Settings) -> None:
    assert identify(REPO, isolated) == {}
    assert hub.fetched() == []
    resolve(REPO, isolated)
    asked = len(hub.requests)
    assert identify(REPO, isolated) == identify(f"{REPO}@{COMMIT}", isolated) == {"revision": COMMIT}
    assert len(hub.requests) == asked


def test_an_incomplete_copy_is_not_known(hub: FakeHub, isolated: Settings) -> None:
    """It may be completed by another commit's files."""
    (resolve(REPO, isolated).path / "tokenizer.json").unlink()
    assert identify(REPO, isolated) == {}


def test_main_moves_on(hub: FakeHub, isolated: Settings) -> None:
    folder = resolve(REPO, isolated).path
    newer = folder.rename(folder.with_name("f" * 40))
    (cache.folder_of(REPO) / "refs" / "main").write_text(newer.name)
    assert cache.whole(RepoName(REPO, REPO)) == newer
    assert identify(REPO, isolated) == {"revision": "f" * 40}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_whose_file_is_replaced(folder: Path, isolated: Settings, name: str) -> None:
    before = identify(str(folder), isolated)
    assert before["path"] == str(folder.resolve())
    assert identify(str(folder), isolated) == before
    later = (folder / name).stat().st_mtime_ns + 1_000_000
    os.utime(folder / name, ns=(later, later))  # the same size, written later
    after = identify(str(folder), isolated)
    assert {key for key in after if after[key] != before[key]} == {name}
    (folder / name).write_text("{  }")
    assert identify(str(folder), isolated)[name]["bytes"] == 4


def test_what_does_not_decide_answers(folder: Path, isolated: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identify(str(folder), isolated)
    (folder / "README.md").write_text("rewritten")
    monkeypatch.chdir(folder.parent)
    (folder.parent / "link").symlink_to(folder)
    assert before == identify("m", isolated) == identify("link", isolated)


def test_a_gguf_file_and_the_demo(tmp_path: Path, isolated: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF" + bytes(60))
    assert identify(str(file), isolated)["x.gguf"]["bytes"] == 64
    assert identify("demo", isolated) == {}
    monkeypatch.setattr(demo, "cached", demo.path_in)
    assert identify("demo", isolated) == {"sha256": demo.GGUF_SHA256}


@pytest.mark.parametrize("name", ["nothing", "no/such/folder/here", "torn", "owner/never-fetched"])
def test_what_is_not_there_is_not_known(tmp_path: Path, hub: FakeHub, isolated: Settings, name: str) -> None:
    (tmp_path / "torn").mkdir()
    assert identify(str(tmp_path / name) if name == "torn" else name, isolated) == {}
