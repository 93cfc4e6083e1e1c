"""The written folder: shards, configs, what is copied and what is not; heads; GGUF sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from checkpoints import write_checkpoint
from minicpm_cli.errors import ConfigError, UsageError, WeightsError
from minicpm_cli.hub.files import check_path
from minicpm_cli.quantize import output
from minicpm_cli.quantize.recipe import Recipe
from minicpm_cli.quantize.run import quantize
from minicpm_cli.quantize.schema import quantization_config
from minicpm_cli.quantize.shards import INDEX, SINGLE, join
from minicpm_cli.text.tokenizer import load_tokenizer
from quantize.quantize_jobs import job_of, loaded, silent
from steps import all_logits, relative_error

IDS = [3, 14, 15, 92, 65, 35, 8, 97, 93, 23]


def quantized(tmp_path: Path, family: str = "minicpm5-1b", **options: Any) -> Path:
    made = {key: options.pop(key) for key in ("fmt", "quant", "tie", "dtype", "layers", "vocab") if key in options}
    source = write_checkpoint(tmp_path / "model", family, **made)
    quantize(job_of(source, tmp_path / "out", **({"method": "rtn"} | options)), silent)
    return tmp_path / "out"


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return found


# ---- shards


def test_parts_become_shards_no_larger_than_the_limit(tmp_path: Path) -> None:
    parts = []
    for number in range(3):
        tensors = {f"{number}.{n}": torch.randn(n, 7).to(torch.bfloat16 if n % 2 else torch.float32) for n in (3, 4, 5)}
        save_file(tensors | {f"{number}.odd": torch.zeros(3, dtype=torch.uint8)}, tmp_path / f"{number}.safetensors")
        parts.append(tmp_path / f"{number}.safetensors")
    names = join(parts, tmp_path, limit=300)
    assert names[-1] == INDEX
    assert len(names) > 3
    index = json.loads((tmp_path / INDEX).read_text())
    found = {}
    for name in names[:-1]:
        tensors = load_file(tmp_path / name)
        assert sum(t.nbytes for t in tensors.values()) <= 300
        assert {index["weight_map"][n] for n in tensors} == {name}
        found |= tensors
    wanted = {n: t for part in parts for n, t in load_file(part).items()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in wanted.values())


def test_one_file_needs_no_index_and_every_tensor_is_aligned(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(3, dtype=torch.uint8), "b": torch.ones(5), "c": torch.ones(3, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "part.safetensors")
    assert join([tmp_path / "part.safetensors"], tmp_path) == [SINGLE]
    found = load_file(tmp_path / SINGLE)
    assert all(torch.equal(found[n], tensors[n]) for n in tensors)
    raw = (tmp_path / SINGLE).read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert header["__metadata__"] == {"format": "pt"}
    assert int.from_bytes(raw[:8], "little") % 8 == 0
    assert header["b"]["data_offsets"][0] % 4 == 0


def test_a_sharded_folder_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "join", lambda parts, folder: join(parts, folder, limit=100_000))
    folder = quantized(tmp_path)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    assert check_path(folder) == folder
    assert relative_error(all_logits(loaded(folder), IDS), all_logits(loaded(tmp_path / "model"), IDS)) < 0.7


# ---- configs


def test_gptq_is_described_as_its_readers_want_it(tmp_path: Path) -> None:
    folder = quantized(tmp_path, method="gptq", skip=("*.0.mlp.down_proj",), damp=0.02, act_order=True)
    found = config_of(folder)["quantization_config"]
    assert {k: found[k] for k in ("quant_method", "bits", "group_size", "desc_act", "sym", "lm_head")} == {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": True,
        "sym": True,
        "lm_head": False,
    }
    assert found["checkpoint_format"] == "gptq"
    assert found["damp_percent"] == 0.02
    assert found["dynamic"] == {r"-:^model\.layers\.0\.mlp\.down_proj$": {}}
    assert "is_marlin_format" not in found
    assert [name.split(":")[0] for name in found["meta"]["quantizer"]] == ["minicpm-cli"]
    assert json.loads((folder / "quantize_config.json").read_text()) == found
    with safe_open(folder / SINGLE, framework="pt") as file:
        names = set(file.keys())
        assert file.get_slice("model.layers.0.mlp.down_proj.weight").get_dtype() == "BF16"
        assert "model.layers.1.mlp.down_proj.qweight" in names


def test_asymmetric_files_name_a_writer_that_gptqmodel_trusts(tmp_path: Path) -> None:
    folder = quantized(tmp_path, symmetric=False)
    found = config_of(folder)["quantization_config"]
    assert found["sym"] is False
    name, version = next(q for q in found["meta"]["quantizer"] if q.startswith("gptqmodel")).split(":")
    assert (name, version > "0.9") == ("gptqmodel", True)
    assert relative_error(all_logits(loaded(folder), IDS), all_logits(loaded(tmp_path / "model"), IDS)) < 0.5


def test_the_other_schemas() -> None:
    four, eight = (quantization_config(Recipe(method=m), ["a.gate"]) for m in ("nf4", "int8"))
    assert (four["load_in_4bit"], four["load_in_8bit"], four["bnb_4bit_quant_type"]) == (True, False, "nf4")
    assert (eight["load_in_4bit"], eight["load_in_8bit"]) == (False, True)
    assert four["llm_int8_skip_modules"] == ["lm_head", "a.gate"]
    fp8 = quantization_config(Recipe(method="fp8"), ["a.gate"])
    (group,) = fp8["config_groups"].values()
    assert (fp8["format"], fp8["ignore"]) == ("float-quantized", ["lm_head", "a.gate"])
    assert (group["weights"]["strategy"], group["input_activations"]["dynamic"]) == ("channel", True)


def test_the_rest_of_the_config_is_the_sources(tmp_path: Path) -> None:
    folder = quantized(tmp_path, "minicpm4-0.5b")
    before, after = config_of(tmp_path / "model"), config_of(folder)
    del after["quantization_config"], before["auto_map"]
    assert after == before


# ---- what is copied


def test_tokenizer_and_template_come_along_and_code_does_not(tmp_path: Path) -> None:
    folder = quantized(tmp_path, "minicpm4-0.5b", fmt="safetensors")
    names = {file.name for file in folder.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "quantize_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    for name in names - {"config.json", "model.safetensors", "quantize_config.json"}:
        assert (folder / name).read_bytes() == (tmp_path / "model" / name).read_bytes()


def test_that_code_stays_behind_is_said_and_its_tokenizer_class_replaced(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "model", "minicpm3-4b", fmt="safetensors")
    tokenizer = json.loads((source / "tokenizer_config.json").read_text())
    own = {"auto_map": {"AutoTokenizer": ["tokenization_minicpm.MiniCPMTokenizer", None]}}
    (source / "tokenizer_config.json").write_text(
        json.dumps(tokenizer | own | {"tokenizer_class": "MiniCPMTokenizer", "add_bos_token": False})
    )
    report = quantize(job_of(source, tmp_path / "out", method="rtn"), silent)
    assert any("the checkpoint's own code" in note and "MiniCPM3ForCausalLM" in note for note in report.notes)
    found = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert "auto_map" not in found
    assert found["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not list((tmp_path / "out").glob("*.py"))


def test_a_quantized_source_is_refused(tmp_path: Path) -> None:
    folder = quantized(tmp_path)
    with pytest.raises(ConfigError, match="is quantized already; give the original"):
        quantize(job_of(folder, tmp_path / "again", method="rtn"), silent)


# ---- types


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.float32, torch.bfloat16), (torch.float16, torch.float16), (torch.bfloat16, torch.bfloat16)],
)
def test_what_stays_plain_keeps_its_type_unless_it_is_wide(
    tmp_path: Path, dtype: torch.dtype, kept: torch.dtype
) -> None:
    folder = quantized(tmp_path, dtype=dtype)
    with safe_open(folder / SINGLE, framework="pt") as file:
        assert file.get_tensor("model.embed_tokens.weight").dtype == kept
        assert file.get_tensor("model.layers.0.input_layernorm.weight").dtype == kept
    assert config_of(folder)["torch_dtype"] == str(kept).removeprefix("torch.")


# ---- the head


def test_an_untied_head_in_8_bits(tmp_path: Path) -> None:
    folder = quantized(tmp_path, head_bits=8)
    found = config_of(folder)["quantization_config"]
    assert found["lm_head"] is True
    assert found["dynamic"] == {"+:^lm_head$": {"bits": 8}}
    with safe_open(folder / SINGLE, framework="pt") as file:
        names = set(file.keys())
    assert "lm_head.qweight" in names
    assert "lm_head.weight" not in names
    quantize(job_of(tmp_path / "model", tmp_path / "plain", method="rtn"), silent)
    same = all_logits(loaded(tmp_path / "plain"), IDS)
    assert 0 < relative_error(all_logits(loaded(folder), IDS), same) < 0.02


def test_a_tied_head_is_left_alone(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "model", "minicpm4-0.5b")
    with pytest.raises(UsageError, match="tied to the embedding"):
        quantize(job_of(source, tmp_path / "out", method="rtn", head_bits=8), silent)
    assert not list(tmp_path.glob("out*")), "it was refused before the work began"
    quantize(job_of(source, tmp_path / "other", method="rtn"), silent)
    with safe_open(tmp_path / "other" / SINGLE, framework="pt") as file:
        names = set(file.keys())
    assert "lm_head.weight" not in names
    assert torch.equal(
        load_file(tmp_path / "other" / SINGLE)["model.embed_tokens.weight"],
        load_file(source / "model.safetensors")["model.embed_tokens.weight"],
    )


def test_a_copy_of_a_tied_head_is_dropped_and_another_matrix_is_an_error(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "model", "minicpm4-0.5b")
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, source / "model.safetensors")
    quantize(job_of(source, tmp_path / "out", method="rtn"), silent)
    assert "lm_head.weight" not in load_file(tmp_path / "out" / SINGLE)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * 2}, source / "model.safetensors")
    with pytest.raises(WeightsError, match="they differ"):
        quantize(job_of(source, tmp_path / "other", method="rtn"), silent)


# ---- other sources


@pytest.mark.parametrize("fmt", ["bin", "bin-sharded", "sharded"])
def test_every_layout_of_weights_gives_the_same(tmp_path: Path, fmt: str) -> None:
    folder = quantized(tmp_path, fmt=fmt)
    (tmp_path / "b").mkdir()
    other = quantized(tmp_path / "b", fmt="safetensors")
    assert (folder / SINGLE).read_bytes() == (other / SINGLE).read_bytes()


@pytest.mark.parametrize(("family", "quant"), [("minicpm5-1b", "F16"), ("minicpm5-1b", "Q4_0"), ("minicpm-2b", "Q8_0")])
def test_a_gguf_file_becomes_a_folder(tmp_path: Path, family: str, quant: str) -> None:
    source = write_checkpoint(tmp_path / "model", family, fmt="gguf", quant=quant)
    report = quantize(job_of(source, tmp_path / "out", bits=8, method="rtn"), silent)
    folder = tmp_path / "out"
    assert check_path(folder) == folder
    assert relative_error(all_logits(loaded(folder), IDS), all_logits(loaded(source), IDS)) < 0.05
    text = "the hello <|im_start|> world 你好\n\n  and 42"
    ours, theirs = load_tokenizer(folder), load_tokenizer(source)
    for control in (True, False):
        assert ours.encode(text, control=control) == theirs.encode(text, control=control)
    assert (ours.bos_id, ours.add_bos, ours.eos_ids_hint) == (theirs.bos_id, theirs.add_bos, theirs.eos_ids_hint)
    assert any("written as bf16" in note for note in report.notes)
    assert loaded(folder).cfg.eos_ids == loaded(source).cfg.eos_ids
