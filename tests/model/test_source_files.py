"""Safetensors and .bin folders: the same tensors by every route, and every way in which files can be wrong."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import FAMILIES, checkpoint_config, is_tied, state_dict, write_checkpoint, write_weights
from minicpm_cli.errors import WeightsError
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.source import open_source

FORMATS = ("safetensors", "sharded", "bin", "bin-sharded")
NORM = "model.norm.weight"


@pytest.fixture
def cfg() -> ModelConfig:
    return ModelConfig.from_hf(checkpoint_config("minicpm5-1b"))


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return state_dict("minicpm5-1b")


def folder_of(path: Path, fmt: str) -> Path:
    return write_checkpoint(path, "minicpm5-1b", fmt=fmt)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor(tmp_path: Path, family: str, fmt: str) -> None:
    folder, state = write_checkpoint(tmp_path, family, fmt=fmt), state_dict(family)
    if is_tied(checkpoint_config(family)):
        del state["lm_head.weight"]
    source = open_source(folder, ModelConfig.from_hf(json.loads((folder / "config.json").read_text())))
    for name in reversed(state):
        assert source.shape(name) == tuple(state[name].shape)
        assert torch.equal(source.take(name, tuple(state[name].shape)), state[name]), name
    left = source.names() - state.keys()
    assert all(n.endswith("inv_freq") for n in left)
    for name in left:
        source.ignore(name)
    source.finish()


def test_reads_what_the_libraries_read(tmp_path: Path, cfg: ModelConfig) -> None:
    for fmt, file in (("safetensors", "model.safetensors"), ("bin", "pytorch_model.bin")):
        folder = folder_of(tmp_path / fmt, fmt)
        want = load_file(folder / file) if fmt != "bin" else torch.load(folder / file, weights_only=True)
        source = open_source(folder, cfg)
        assert source.names() == want.keys()
        assert all(torch.equal(source.take(n, tuple(t.shape)), t) for n, t in want.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("fmt", ["safetensors", "bin"])
def test_float_types(tmp_path: Path, cfg: ModelConfig, dtype: torch.dtype, fmt: str) -> None:
    write_weights(tmp_path, {NORM: torch.arange(192).to(dtype)}, fmt)
    assert torch.equal(open_source(tmp_path, cfg).take(NORM, (192,)), torch.arange(192).to(dtype))


@pytest.mark.parametrize("fmt", ["safetensors", "bin"])
def test_integers_are_no_weights(tmp_path: Path, cfg: ModelConfig, fmt: str) -> None:
    write_weights(tmp_path, {NORM: torch.arange(192)}, fmt)
    with pytest.raises(WeightsError, match=rf"{NORM} is .*64.*expected"):
        open_source(tmp_path, cfg).take(NORM, (192,))


@pytest.mark.parametrize("fmt", FORMATS)
def test_wrong_shape_names_everything(tmp_path: Path, cfg: ModelConfig, fmt: str) -> None:
    source = open_source(folder_of(tmp_path, fmt), cfg)
    with pytest.raises(WeightsError) as caught:
        source.take("model.embed_tokens.weight", (417, 192))
    message = str(caught.value)
    assert all(part in message for part in (str(tmp_path), "model.embed_tokens.weight", "[416, 192]", "[417, 192]"))
    with pytest.raises(WeightsError, match="intermediate_size is 576, the file says 192"):
        source.take("model.layers.0.self_attn.k_proj.weight", (32, 576))


@pytest.mark.parametrize("fmt", FORMATS)
def test_missing_and_left_over(tmp_path: Path, cfg: ModelConfig, state: dict[str, torch.Tensor], fmt: str) -> None:
    del state["model.layers.1.mlp.up_proj.weight"]
    state |= {f"model.layers.7.extra{i}.weight": torch.ones(1) for i in range(20)}
    write_weights(tmp_path, state, fmt)
    source = open_source(tmp_path, cfg)
    with pytest.raises(
        WeightsError, match=r"no tensor model.layers.1.mlp.up_proj.weight \(missing in 1 of 2 layers: 1\)"
    ):
        source.take("model.layers.1.mlp.up_proj.weight", (576, 192))
    with pytest.raises(WeightsError, match=r"no tensor model.nothing"):
        source.shape("model.nothing")
    for name in state:
        if "extra" not in name:
            source.take(name, tuple(state[name].shape))
    with pytest.raises(WeightsError, match=r"20 tensors .* model.layers.7.extra0.weight.* and 12 more"):
        source.finish()


@pytest.mark.parametrize("fmt", FORMATS)
def test_tensors_outlive_the_source(tmp_path: Path, cfg: ModelConfig, state: dict[str, torch.Tensor], fmt: str) -> None:
    source = open_source(folder_of(tmp_path, fmt), cfg)
    kept = {n: source.take(n, tuple(t.shape)) for n, t in state.items()}
    source.finish()
    del source
    assert all(torch.equal(kept[n], t) for n, t in state.items())


def test_tied_bin_shares_its_storage(tmp_path: Path, cfg: ModelConfig) -> None:
    embed = torch.randn(416, 192)
    torch.save({"model.embed_tokens.weight": embed, "lm_head.weight": embed}, tmp_path / "pytorch_model.bin")
    source = open_source(tmp_path, cfg)
    a, b = (source.take(n, (416, 192)) for n in ("model.embed_tokens.weight", "lm_head.weight"))
    assert torch.equal(a, embed)
    assert a.data_ptr() == b.data_ptr()


def test_safetensors_before_bin(tmp_path: Path, cfg: ModelConfig) -> None:
    write_weights(tmp_path, {NORM: torch.ones(192)}, "safetensors")
    write_weights(tmp_path, {NORM: torch.zeros(192)}, "bin")
    assert open_source(tmp_path, cfg).take(NORM, (192,)).sum() == 192


def test_loose_safetensors_without_an_index(tmp_path: Path, cfg: ModelConfig, state: dict[str, torch.Tensor]) -> None:
    write_weights(tmp_path, state, "sharded")
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file({"x": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    assert open_source(tmp_path, cfg).names() == state.keys()
    save_file({NORM: torch.ones(192)}, tmp_path / "zz.safetensors")
    with pytest.raises(WeightsError, match=rf"{NORM} is in both .*model-00003.* and zz.safetensors"):
        open_source(tmp_path, cfg)


def test_nothing_there(tmp_path: Path, cfg: ModelConfig) -> None:
    with pytest.raises(WeightsError, match="holds no weights"):
        open_source(tmp_path, cfg)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(WeightsError, match="not a model folder"):
        open_source(tmp_path / "notes.txt", cfg)
    (tmp_path / "training_args.bin").write_text("x")
    with pytest.raises(WeightsError, match="holds no weights"):
        open_source(tmp_path, cfg)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_git_lfs_pointer(tmp_path: Path, cfg: ModelConfig, name: str) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n")
    with pytest.raises(WeightsError, match="git lfs pull"):
        open_source(tmp_path, cfg)


# ---- safetensors headers


def header_file(folder: Path, header: Any, payload: int = 768, length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(payload))
    return path


def entry(begin: int = 0, end: int = 768, dtype: str = "F32", shape: Any = (192,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HEADERS: dict[str, tuple[Any, str]] = {
    "not json": (b"{nope", "not valid JSON"),
    "not utf-8": (b'{"\xff": 1}', "not valid JSON"),
    "deep": (b"[" * 100_000, "not valid JSON"),
    "a list": ([], "not a JSON object"),
    "name twice": (b'{"a": {}, "a": {}}', "appears twice"),
    "no offsets": ({NORM: {"dtype": "F32", "shape": [1]}}, "lacks"),
    "three offsets": ({NORM: entry() | {"data_offsets": [0, 1, 2]}}, "lacks"),
    "negative": ({NORM: entry(-4, 764)}, "whole numbers"),
    "fraction": ({NORM: entry(0, 768.0)}, "whole numbers"),  # type: ignore[arg-type]
    "true": ({NORM: entry(shape=[True, 192])}, "whole numbers"),
    "unknown dtype": ({NORM: entry(dtype="F31")}, "unknown dtype 'F31'"),
    "dtype is a list": ({NORM: entry() | {"dtype": []}}, "unknown dtype"),
    "dtype and size": ({NORM: entry(dtype="BF16")}, "BF16 [192]) expects 384 bytes, its offsets span 768"),
    "overlap": ({"a": entry(0, 400, "U8", [400]), "b": entry(200, 768, "U8", [568])}, "overlap"),
    "gap": ({"a": entry(0, 100, "U8", [100]), "b": entry(200, 768, "U8", [568])}, "gap"),
    "late start": ({"a": entry(8, 768, "U8", [760])}, "starts at byte 8"),
    "short file": ({NORM: entry(0, 1792, shape=[448])}, "expects"),
    "long file": ({NORM: entry(0, 384, shape=[96])}, "expects"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_bad_headers(tmp_path: Path, cfg: ModelConfig, case: str) -> None:
    header, message = HEADERS[case]
    path = header_file(tmp_path, header)
    with pytest.raises(WeightsError) as caught:
        open_source(tmp_path, cfg)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_header_length_beyond_the_file(tmp_path: Path, cfg: ModelConfig) -> None:
    for length in (2**63, 2**64 - 1, 100_000_001, 900):
        header_file(tmp_path, b"{}", length=length)
        with pytest.raises(WeightsError, match=rf"header expects {length} bytes, the file has 770"):
            open_source(tmp_path, cfg)
    os.truncate(
        header_file(tmp_path, b"{}", length=100_000_001), 200_000_000
    )  # sparse; room enough, but never that long
    with pytest.raises(WeightsError, match="header expects 100000001 bytes"):
        open_source(tmp_path, cfg)
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    with pytest.raises(WeightsError, match="the file has 3"):
        open_source(tmp_path, cfg)


def test_the_last_kilobyte_cut(tmp_path: Path, cfg: ModelConfig) -> None:
    path = folder_of(tmp_path, "safetensors") / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 1024)
    with pytest.raises(WeightsError, match=rf"model.safetensors: expects {size} bytes, the file has {size - 1024}"):
        open_source(tmp_path, cfg)


def test_an_empty_tensor_is_allowed(tmp_path: Path, cfg: ModelConfig) -> None:
    header_file(tmp_path, {"a": entry(0, 0, shape=[0]), NORM: entry(), "__metadata__": {"format": "pt"}})
    assert open_source(tmp_path, cfg).names() == {"a", NORM}


# ---- sharded


def edit_index(folder: Path, change: Any) -> None:
    path = next(folder.glob("*.index.json"))
    raw = json.loads(path.read_text())
    change(raw["weight_map"])
    path.write_text(json.dumps(raw))


def take_all(folder: Path, cfg: ModelConfig) -> None:
    source = open_source(folder, cfg)
    for name in sorted(source.names()):
        source.take(name, source.shape(name))
    source.finish()


@pytest.mark.parametrize("fmt", ["sharded", "bin-sharded"])
def test_a_shard_is_missing(tmp_path: Path, cfg: ModelConfig, fmt: str) -> None:
    next(folder_of(tmp_path, fmt).glob("*-00002-of-*")).unlink()
    with pytest.raises(WeightsError, match=r"names 3 files, 1 of them are not there, first .*-00002-of-00003"):
        open_source(tmp_path, cfg)


@pytest.mark.parametrize("fmt", ["sharded", "bin-sharded"])
def test_index_and_shards_disagree(tmp_path: Path, cfg: ModelConfig, fmt: str) -> None:
    folder_of(tmp_path, fmt)
    edit_index(tmp_path, lambda m: m.update({"model.more.weight": m[NORM]}))
    with pytest.raises(WeightsError, match=r"-00003-of.* lacks 1 tensors .* model.more.weight"):
        take_all(tmp_path, cfg)
    edit_index(tmp_path, lambda m: [m.pop(n) for n in ("model.more.weight", NORM)])
    with pytest.raises(WeightsError, match=rf"holds tensor {NORM} but the index does not list it"):
        take_all(tmp_path, cfg)


@pytest.mark.parametrize("fmt", ["sharded", "bin-sharded"])
def test_one_tensor_in_two_shards(tmp_path: Path, cfg: ModelConfig, state: dict[str, torch.Tensor], fmt: str) -> None:
    write_weights(tmp_path, state, fmt)
    first = next(tmp_path.glob("*-00001-of-*"))
    names = [
        n
        for n, f in json.loads(next(tmp_path.glob("*.index.json")).read_text())["weight_map"].items()
        if f == first.name
    ]
    part = {n: state[n] for n in [*names, NORM]}
    save_file(part, first) if fmt == "sharded" else torch.save(part, first)
    with pytest.raises(WeightsError, match=rf"-00001-of.* holds tensor {NORM} but the index places it in .*-00003-of"):
        take_all(tmp_path, cfg)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/../../x", "..\\x.safetensors", "C:\\x"])
@pytest.mark.parametrize("fmt", ["sharded", "bin-sharded"])
def test_index_must_not_leave_its_folder(tmp_path: Path, cfg: ModelConfig, fmt: str, name: str) -> None:
    folder = folder_of(tmp_path / "in", fmt)
    save_file({NORM: torch.ones(192)}, tmp_path / "x.safetensors")
    edit_index(folder, lambda m: m.update({NORM: name}))
    with pytest.raises(WeightsError, match="outside its folder"):
        open_source(folder, cfg)


def move_behind_links(folder: Path, blobs: Path) -> None:
    blobs.mkdir(parents=True)
    for i, file in enumerate(sorted(folder.glob("*.safetensors"))):
        file.rename(blobs / f"{i:064x}")
        file.symlink_to(os.path.relpath(blobs / f"{i:064x}", folder))


def test_links_of_the_hub_cache_are_followed(tmp_path: Path, cfg: ModelConfig) -> None:
    model = tmp_path / "models--openbmb--MiniCPM5-1B"
    folder = folder_of(model / "snapshots" / "4e9de7a0", "sharded")
    move_behind_links(folder, model / "blobs")
    take_all(folder, cfg)


def test_links_elsewhere_are_not(tmp_path: Path, cfg: ModelConfig) -> None:
    folder = folder_of(tmp_path / "plain", "sharded")
    move_behind_links(folder, tmp_path / "blobs")
    with pytest.raises(WeightsError, match="a link out of its folder"):
        open_source(folder, cfg)
    cache = folder_of(tmp_path / "hub" / "models--a--b" / "snapshots" / "1", "sharded")
    move_behind_links(cache, tmp_path / "elsewhere")
    with pytest.raises(WeightsError, match="a link out of its folder"):
        open_source(cache, cfg)


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"{}", b'{"weight_map": {}}', b'{"weight_map": {"a": 1}}', b"\xff", b"[" * 99999]
)
def test_broken_index(tmp_path: Path, cfg: ModelConfig, raw: bytes) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(raw)
    with pytest.raises(WeightsError, match=r"index.json"):
        open_source(tmp_path, cfg)


# ---- pickles


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("fmt", ["bin", "bin-sharded"])
def test_a_pickle_that_runs_code(tmp_path: Path, cfg: ModelConfig, zipped: bool, fmt: str) -> None:
    folder, touched = tmp_path / "m", tmp_path / "touched"
    folder_of(folder, fmt)
    bad = next(folder.glob("pytorch_model*.bin"))
    torch.save({NORM: torch.ones(2), "evil": Touch(touched)}, bad, _use_new_zipfile_serialization=zipped)
    with pytest.raises(WeightsError, match=r"tries to run code when it is loaded \(\w+\.system\); it was refused"):
        take_all(folder, cfg)
    assert not touched.exists()


def test_the_trap_works(tmp_path: Path) -> None:
    """The file above does run code for a loader that lets it."""
    pickle.loads(pickle.dumps(Touch(tmp_path / "touched")))
    assert (tmp_path / "touched").exists()


def test_bare_pickle(tmp_path: Path, cfg: ModelConfig) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({NORM: Touch(tmp_path / "touched")}))
    with pytest.raises(WeightsError, match=r"not a pickle of plain tensors|tries to run code"):
        open_source(tmp_path, cfg)
    assert not (tmp_path / "touched").exists()


def test_old_format_without_zip(tmp_path: Path, cfg: ModelConfig, state: dict[str, torch.Tensor]) -> None:
    torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    source = open_source(tmp_path, cfg)
    assert all(torch.equal(source.take(n, tuple(t.shape)), t) for n, t in state.items())


@pytest.mark.parametrize("zipped", [True, False])
def test_torn_bin(tmp_path: Path, cfg: ModelConfig, state: dict[str, torch.Tensor], zipped: bool) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    size = path.stat().st_size
    for left in (size - 1024, size // 2, 100, 3, 0):
        os.truncate(path, left)
        with pytest.raises(WeightsError, match=r"pytorch_model.bin: .*damaged"):
            open_source(tmp_path, cfg)


@pytest.mark.parametrize("value", [[1, 2], {"state_dict": {NORM: torch.ones(2)}}, {"epoch": 3}, {3: torch.ones(2)}])
def test_bin_of_something_else(tmp_path: Path, cfg: ModelConfig, value: Any) -> None:
    torch.save(value, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="expected"):
        open_source(tmp_path, cfg)


def test_sparse_tensors_are_refused(tmp_path: Path, cfg: ModelConfig) -> None:
    torch.save({NORM: torch.ones(192).to_sparse()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="dense floats"):
        open_source(tmp_path, cfg).take(NORM, (192,))


def test_parameters_come_without_gradients(tmp_path: Path, cfg: ModelConfig) -> None:
    torch.save({NORM: torch.nn.Parameter(torch.ones(192))}, tmp_path / "pytorch_model.bin")
    assert not open_source(tmp_path, cfg).take(NORM, (192,)).requires_grad


def test_one_bin_shard_at_a_time(tmp_path: Path, cfg: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = []
    real = torch.load
    monkeypatch.setattr(torch, "load", lambda f, **k: (loads.append(f.name), real(f, **k))[1])
    source = open_source(folder_of(tmp_path, "bin-sharded"), cfg)
    assert loads == []
    for name in json.loads((tmp_path / "pytorch_model.bin.index.json").read_text())["weight_map"]:
        source.take(name, source.shape(name))
    assert [n[-17:-13] for n in loads] == ["0001", "0002", "0003"]
