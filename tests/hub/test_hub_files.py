"""Local paths: a folder or file that is no whole model is refused with the names of what it lacks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minicpm_cli.errors import ConfigError, ModelNotFound, TokenizerError, WeightsError
from minicpm_cli.hub import resolve
from minicpm_cli.hub.files import read_json
from minicpm_cli.settings import Settings


def folder(root: Path, **files: str | bytes) -> Path:
    """A folder of these files; "__" in a name stands for a dot, as the first of them for the suffix."""
    root.mkdir(exist_ok=True)
    for name, data in files.items():
        (root / name.replace("__", ".")).write_bytes(data.encode() if isinstance(data, str) else data)
    return root


def whole(root: Path) -> Path:
    return folder(root, config__json="{}", model__safetensors="weights", tokenizer__json="{}")


def test_a_whole_folder(tmp_path: Path, isolated: Settings) -> None:
    path = whole(tmp_path / "m")
    files = resolve(str(path), isolated)
    assert (files.path, files.revision) == (path, None)


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("config.json", r"missing config\.json"),
        ("model.safetensors", r"missing model\.safetensors \(or pytorch_model\.bin"),
        ("tokenizer.json", r"missing tokenizer\.json or tokenizer\.model"),
    ],
)
def test_each_missing_file_is_named(tmp_path: Path, isolated: Settings, lost: str, said: str) -> None:
    path = whole(tmp_path / "m")
    (path / lost).unlink()
    with pytest.raises((ModelNotFound, WeightsError), match=said):
        resolve(str(path), isolated)


def test_an_empty_folder_and_an_empty_shard(tmp_path: Path, isolated: Settings) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFound, match=r"missing config\.json.*The folder is empty"):
        resolve(str(tmp_path / "empty"), isolated)
    path = whole(tmp_path / "m")
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"missing model\.safetensors"):
        resolve(str(path), isolated)


def test_unfinished_output_is_not_a_model(tmp_path: Path, isolated: Settings) -> None:
    path = whole(tmp_path / "m")
    (path / "model.safetensors").rename(path / "model.safetensors.part")
    (path / "config.json").unlink()
    with pytest.raises(
        ModelNotFound, match=r"missing config\.json, model.*There is model\.safetensors\.part: an unfin"
    ):
        resolve(str(path), isolated)


@pytest.mark.parametrize(
    ("single", "pattern"), [("model.safetensors", "model"), ("pytorch_model.bin", "pytorch_model")]
)
def test_each_absent_shard_is_named(tmp_path: Path, isolated: Settings, single: str, pattern: str) -> None:
    path = whole(tmp_path / "m")
    (path / "model.safetensors").unlink()
    suffix = single.rpartition(".")[2]
    shards = [f"{pattern}-0000{i}-of-00003.{suffix}" for i in (1, 2, 3)]
    (path / f"{single}.index.json").write_text(json.dumps({"weight_map": {f"t{i}": s for i, s in enumerate(shards)}}))
    (path / shards[1]).write_bytes(b"x")
    with pytest.raises(WeightsError) as caught:
        resolve(str(path), isolated)
    assert f"missing {shards[0]}, {shards[2]}." in str(caught.value)


def test_shards_without_their_index(tmp_path: Path, isolated: Settings) -> None:
    path = whole(tmp_path / "m")
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    with pytest.raises(WeightsError, match=r"missing model\.safetensors\.index\.json, model-00002-of-00002"):
        resolve(str(path), isolated)


def test_whole_safetensors_beside_an_index_of_absent_bin_files(tmp_path: Path, isolated: Settings) -> None:
    path = whole(tmp_path / "m")
    (path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "pytorch_model-00001-of-00002.bin"}}')
    assert resolve(str(path), isolated).path == path


def test_an_adapter_is_not_weights(tmp_path: Path, isolated: Settings) -> None:
    path = folder(tmp_path / "a", adapter_config__json="{}", adapter_model__safetensors="x")
    with pytest.raises(ModelNotFound, match=r"LoRA adapter.*--lora"):
        resolve(str(path), isolated)


def test_a_torn_index(tmp_path: Path, isolated: Settings) -> None:
    path = whole(tmp_path / "m")
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a"')
    with pytest.raises(ConfigError, match=r"index\.json cannot be read as JSON"):
        resolve(str(path), isolated)


def test_a_gguf_file(tmp_path: Path, isolated: Settings) -> None:
    path = folder(tmp_path / "g", model__gguf=b"GGUF\x03")
    assert resolve(str(path / "model.gguf"), isolated).path == path / "model.gguf"
    with pytest.raises(ModelNotFound, match=r"holds GGUF files: name one, such as .*model\.gguf"):
        resolve(str(path), isolated)
    (path / "model.gguf").write_bytes(b"<html>")
    with pytest.raises(WeightsError, match=r"does not begin with GGUF.*6 bytes"):
        resolve(str(path / "model.gguf"), isolated)
    (path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelNotFound, match=r"must be a \.gguf"):
        resolve(str(path / "model.bin"), isolated)


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "minicpm4-0.5", "nothing", "a b", "../x/y", "a/b/c", ""])
def test_no_such_model(isolated: Settings, name: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        resolve(name, isolated)
    assert caught.value.exit_code == 3
    assert ("Did you mean minicpm4-0.5b?" in str(caught.value)) == (name == "minicpm4-0.5")


def test_a_folder_called_demo_does_not_hide_the_demo(
    tmp_path: Path, isolated: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minicpm_cli.hub import demo

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "fetch", lambda cache, report: Path("the demo"))
    (tmp_path / "demo").mkdir()
    assert resolve("demo", isolated).path == Path("the demo")
    whole(tmp_path / "demo")
    assert resolve("demo", isolated).path == Path("demo")


@pytest.mark.parametrize("data", [b"{", b"", b"\xff{}", b"[" * 100_000, b"[]", b"null"])
def test_json_that_is_no_object_raises_the_class_asked_for(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.json").write_bytes(data)
    with pytest.raises(ConfigError, match=r"x\.json .*Fetch it again"):
        read_json(tmp_path / "x.json")
    with pytest.raises(TokenizerError, match=r"x\.json"):
        read_json(tmp_path / "x.json", TokenizerError, required=False)
    assert read_json(tmp_path / "absent.json", required=False) == {}
    with pytest.raises(ConfigError, match=r"absent\.json"):
        read_json(tmp_path / "absent.json")
