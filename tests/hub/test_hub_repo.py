"""Repositories of a model hub: what is fetched, what a fault leaves behind, and what works without a network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import COMMIT, FakeHub
from tiny_repo import NEEDED, REPO, SHARDS

from minicpm_cli.errors import FileError, ModelNotFound, WeightsError
from minicpm_cli.hub import cache, list_models, pull, resolve
from minicpm_cli.hub.contents import RepoName
from minicpm_cli.settings import Settings


@pytest.fixture
def offline(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_fetches_what_a_model_needs_and_no_code(hub: FakeHub, isolated: Settings) -> None:
    files = resolve(REPO, isolated)
    assert files.name == REPO
    assert files.revision == COMMIT == files.path.name
    assert {p.name for p in files.path.iterdir()} == NEEDED
    assert all((files.path / name).read_bytes() == data for name, data in SHARDS.items())
    assert sorted(hub.fetched()) == sorted(NEEDED)


def test_bin_weights_only_without_safetensors(hub: FakeHub, isolated: Settings) -> None:
    for name in [n for n in hub.files if "safetensors" in n]:
        del hub.files[name]
    files = resolve(REPO, isolated)
    assert (files.path / "pytorch_model.bin").is_file()
    assert not list(files.path.glob("*.py"))


def test_progress_counts_the_bytes_to_come(hub: FakeHub, isolated: Settings) -> None:
    seen: list[tuple[str, int, int | None]] = []
    resolve(REPO, isolated, lambda *state: seen.append(state))
    total = sum(len(hub.files[n]) for n in NEEDED)
    fetching = [done for what, done, of in seen if what == f"fetching {REPO}" and of == total]
    assert fetching[0] == 0
    assert fetching[-1] == total
    assert fetching == sorted(fetching)


def test_a_whole_copy_is_used_without_asking(hub: FakeHub, isolated: Settings) -> None:
    first = resolve(REPO, isolated)
    hub.requests.clear()
    assert resolve(REPO, isolated) == first
    assert hub.requests == []


def test_pull_takes_the_newer_version_and_resolve_keeps_it(hub: FakeHub, isolated: Settings) -> None:
    old = resolve(REPO, isolated)
    hub.commit = "bead" * 10
    hub.files["generation_config.json"] = b'{"temperature": 0.5}'
    assert resolve(REPO, isolated) == old
    hub.requests.clear()
    new = pull(REPO, isolated)
    assert new.revision == hub.commit
    assert hub.fetched() == ["generation_config.json"]
    assert resolve(REPO, isolated) == new


def test_a_revision_is_another_model(hub: FakeHub, isolated: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    named = resolve(f"{REPO}@v1", isolated)
    assert named.name == f"{REPO}@v1"
    go_offline(monkeypatch)
    assert resolve(f"{REPO}@v1", isolated).path == named.path
    assert resolve(f"{REPO}@{COMMIT}", isolated).path == named.path
    with pytest.raises(ModelNotFound, match="not in the cache"):
        resolve(REPO, isolated)


def test_an_unknown_revision(hub: FakeHub, isolated: Settings) -> None:
    with pytest.raises(ModelNotFound, match=f"{REPO} has no revision 'v9'"):
        resolve(f"{REPO}@v9", isolated)


def test_an_unknown_repository(hub: FakeHub, isolated: Settings) -> None:
    with pytest.raises(ModelNotFound, match=r"someone/else does not exist at http.*private.*minicpm models") as caught:
        resolve("someone/else", isolated)
    assert caught.value.exit_code == 3


def test_a_gated_repository_says_what_to_do(hub: FakeHub, isolated: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    with pytest.raises(ModelNotFound, match=f"gated: accept its terms at .*{REPO}, then set HF_TOKEN"):
        resolve(REPO, isolated)
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(ModelNotFound, match="gated"):
        resolve(REPO, isolated)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert resolve(REPO, isolated).revision == COMMIT


@pytest.mark.parametrize(("status", "said"), [(500, "cannot be reached"), (403, "HTTP 403: check HF_TOKEN")])
def test_a_hub_that_refuses(hub: FakeHub, isolated: Settings, status: int, said: str) -> None:
    hub.status = status
    with pytest.raises(ModelNotFound, match=f"{REPO} is not in the cache.*{said}"):
        resolve(REPO, isolated)


def test_a_broken_transfer_goes_on_where_it_stopped(
    hub: FakeHub, isolated: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)
    name = "model-00002-of-00003.safetensors"
    hub.cuts[name] = 1
    files = resolve(REPO, isolated)
    assert (files.path / name).read_bytes() == SHARDS[name]
    assert hub.ranges == ["bytes=2500-"]


def test_an_interrupted_fetch_never_looks_complete(
    hub: FakeHub, isolated: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    torn = "model-00003-of-00003.safetensors"
    hub.cuts[torn] = 1000
    with pytest.raises(ModelNotFound, match=rf"incomplete.*Missing: {re.escape(torn)}"):
        resolve(REPO, isolated)
    assert cache.whole(RepoName(REPO, REPO)) is None
    hub.cuts.clear()
    hub.requests.clear()
    files = resolve(REPO, isolated)
    assert torn in hub.fetched()
    assert set(hub.fetched()).isdisjoint(set(SHARDS) - {torn})  # what had come is not fetched twice
    assert (files.path / torn).read_bytes() == SHARDS[torn]
    assert not list((tmp := cache.folder_of(REPO)).rglob("*.incomplete")), tmp


def test_a_size_that_is_not_what_the_hub_announced(hub: FakeHub, isolated: Settings) -> None:
    hub.announced["model-00001-of-00003.safetensors"] = 5001
    with pytest.raises(WeightsError, match=r"what came is not what the hub announced .*5001 .*Try again"):
        resolve(REPO, isolated)
    assert cache.whole(RepoName(REPO, REPO)) is None


def test_a_shard_that_the_hub_does_not_list(hub: FakeHub, isolated: Settings) -> None:
    del hub.files["model-00002-of-00003.safetensors"]
    with pytest.raises(WeightsError, match=r"not complete on the hub itself: model-00002-of-00003\.safetensors"):
        resolve(REPO, isolated)


def test_a_listed_file_that_cannot_be_fetched(hub: FakeHub, isolated: Settings) -> None:
    hub.gone.add("model-00002-of-00003.safetensors")
    with pytest.raises(ModelNotFound, match=r"Missing: .*model-00002-of-00003"):
        resolve(REPO, isolated)


@pytest.mark.parametrize("lost", ["model-00001-of-00003.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_offline_names_the_one_missing_file(
    hub: FakeHub, isolated: Settings, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    (resolve(REPO, isolated).path / lost).unlink()
    go_offline(monkeypatch)
    hub.requests.clear()
    with pytest.raises(ModelNotFound, match="HF_HUB_OFFLINE is set") as caught:
        resolve(REPO, isolated)
    missing = re.search(r"Missing: (.*?)\. Fetch", str(caught.value))
    assert missing is not None
    assert missing[1] == lost
    assert hub.requests == []


def test_offline_a_file_cut_short_is_missing(hub: FakeHub, isolated: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = resolve(REPO, isolated).path / "model-00001-of-00003.safetensors"
    os.truncate(cut.resolve(), 4000)
    go_offline(monkeypatch)
    with pytest.raises(ModelNotFound, match=rf"Missing: {re.escape(cut.name)}\."):
        resolve(REPO, isolated)


def test_offline_without_the_hubs_listing_the_index_tells(
    hub: FakeHub, isolated: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve(REPO, isolated).path
    shutil.rmtree(cache.folder_of(REPO) / "trees")
    (folder / "model-00002-of-00003.safetensors").unlink()
    go_offline(monkeypatch)
    with pytest.raises(ModelNotFound, match=r"Missing: model-00002-of-00003\.safetensors\."):
        resolve(REPO, isolated)


@pytest.mark.usefixtures("offline")
def test_offline_and_never_fetched(isolated: Settings) -> None:
    with pytest.raises(ModelNotFound, match=rf"not in the cache.*HF_HUB_OFFLINE.*minicpm pull {REPO}"):
        resolve(REPO, isolated)


def test_a_network_that_is_down(hub: FakeHub, isolated: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    whole = resolve(REPO, isolated)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert pull(REPO, isolated) == whole  # the copy that is here serves
    with pytest.raises(ModelNotFound, match=r"someone/else is not in the cache.*cannot be reached"):
        resolve("someone/else", isolated)


def test_a_disk_without_room(hub: FakeHub, isolated: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))  # type: ignore[attr-defined]
    with pytest.raises(FileError, match=r"someone/tiny needs 21\.\d kB .* 10 B are free.*HF_HOME"):
        resolve(REPO, isolated)
    assert hub.fetched() == []


def test_a_disk_that_fills_up(hub: FakeHub, isolated: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(FileError, match="the disk is full while fetching someone/tiny"):
        resolve(REPO, isolated)


def test_a_defect_of_our_own_is_not_blamed_on_the_hub(
    hub: FakeHub, isolated: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args: None)
    with pytest.raises(TypeError):
        resolve(REPO, isolated)


def test_gguf_repositories_want_a_file(hub: FakeHub, isolated: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files = {"tiny-Q8_0.gguf": b"GGUF" * 2000, "tiny-F16.gguf": b"GGUF" * 3000, "README.md": b""}
    with pytest.raises(ModelNotFound, match=r"-m someone/tiny/tiny-F16\.gguf\. All: tiny-F16\.gguf, tiny-Q8_0\.gguf"):
        resolve(REPO, isolated)
    with pytest.raises(ModelNotFound, match=r"has no file tiny-Q4\.gguf; its GGUF files: .*Q8_0"):
        resolve(f"{REPO}/tiny-Q4.gguf", isolated)
    files = resolve(f"{REPO}/tiny-Q8_0.gguf", isolated)
    assert files.path.read_bytes() == hub.files["tiny-Q8_0.gguf"]
    assert hub.fetched() == ["tiny-Q8_0.gguf"]
    go_offline(monkeypatch)
    assert resolve(f"{REPO}/tiny-Q8_0.gguf", isolated) == files
    with pytest.raises(ModelNotFound, match=r"Missing: tiny-F16\.gguf"):
        resolve(f"{REPO}/tiny-F16.gguf", isolated)


def test_a_repository_without_weights(hub: FakeHub, isolated: Settings) -> None:
    hub.files = {"config.json": b"{}", "training_args.bin": b"x"}
    with pytest.raises(ModelNotFound, match="holds no weights"):
        resolve(REPO, isolated)
    hub.files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}
    with pytest.raises(ModelNotFound, match=r"LoRA adapter.*--lora"):
        resolve(REPO, isolated)


def test_pull_reads_every_byte_again(hub: FakeHub, isolated: Settings) -> None:
    blob = (resolve(REPO, isolated).path / "model-00002-of-00003.safetensors").resolve()
    data = bytearray(blob.read_bytes())
    data[2500] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(data)
    with pytest.raises(WeightsError, match=r"model-00002.*damaged.*Delete .* and pull again") as caught:
        pull(REPO, isolated)
    assert str(blob) in str(caught.value)
    blob.unlink()
    assert pull(REPO, isolated).path.joinpath("model-00002-of-00003.safetensors").read_bytes() != bytes(data)


def test_models_shows_what_is_here(hub: FakeHub, isolated: Settings) -> None:
    hub.name = "openbmb/MiniCPM4-0.5B"
    files = resolve("minicpm4-0.5b", isolated)
    assert files.name == "minicpm4-0.5b"
    rows = {row.entry.alias: row for row in list_models(isolated)}
    assert rows["minicpm4-0.5b"].path == files.path
    assert rows["minicpm4-0.5b"].stored == sum(len(hub.files[n]) for n in NEEDED)
    assert rows["minicpm5-1b"].path is None
    assert rows["demo"].path is None
    (files.path / "model-00002-of-00003.safetensors").unlink()
    rows = {row.entry.alias: row for row in list_models(isolated)}
    assert rows["minicpm4-0.5b"].path is None
    assert rows["minicpm4-0.5b"].missing == ("model-00002-of-00003.safetensors",)
    (files.path / "model.safetensors.index.json").unlink()
    (files.path / "model.safetensors.index.json").write_text("{")
    rows = {row.entry.alias: row for row in list_models(isolated)}
    assert "cannot be read" in rows["minicpm4-0.5b"].missing[0]


@pytest.mark.usefixtures("isolated")
def test_the_environment_means_what_it_means_elsewhere(hub: FakeHub, tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE through a process of its own, on the command line."""
    environment = dict(os.environ) | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "minicpm_cli", "pull", REPO]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)

    done = run()
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert folder.is_relative_to(tmp_path / "home" / "hub")
    assert {p.name for p in folder.iterdir()} == NEEDED
    (folder / "tokenizer_config.json").unlink()
    environment["HF_HUB_OFFLINE"] = "1"
    done = run()
    assert done.returncode == 3
    assert "Missing: tokenizer_config.json" in done.stderr
    assert done.stdout == ""
