"""Calibration rows: from a text, from conversations, from the model itself; too few of them are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from checkpoints import checkpoint_config, write_checkpoint
from minicpm_cli.errors import FileError, UsageError
from minicpm_cli.hub.files import ModelFiles
from minicpm_cli.llm.prompter import Prompter
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.quantize.calibration import Amount, amount, check_amount, floor, from_file, packed, spread
from minicpm_cli.quantize.recipe import Recipe
from minicpm_cli.quantize.run import quantize
from minicpm_cli.quantize.samples import model_samples, openings, own_samples
from minicpm_cli.quantize.seating import CACHE_BYTES, Seating
from minicpm_cli.settings import LoadOptions
from minicpm_cli.types import Message
from quantize.quantize_jobs import job_of, loaded, silent
from steps import all_logits

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("calibration") / "model", "minicpm5-1b")


@pytest.fixture(scope="module")
def prompter(model: Path) -> Prompter:
    return Prompter.open(LoadOptions(), ModelFiles("model", model))


def test_rows_lie_evenly_over_the_tokens() -> None:
    assert spread(range(100), Amount(3, 20)).tolist() == [list(range(s, s + 20)) for s in (0, 40, 80)]
    assert spread(range(40), Amount(9, 20)).tolist() == [list(range(20)), list(range(20, 40))]
    assert spread(range(7), Amount(9, 20)).tolist() == [list(range(7))]
    assert spread(range(50), Amount(1, 20)).tolist() == [list(range(20))]


def test_samples_are_packed_one_behind_the_other() -> None:
    assert packed([[1, 2, 3], [4], [5, 6, 7, 8]], Amount(2, 3)).tolist() == [[1, 2, 3], [4, 5, 6]]


def test_a_text_is_read_as_it_is(tmp_path: Path, prompter: Prompter) -> None:
    text = "the hello world <|im_end|> 世界\n" * 30
    (tmp_path / "a.txt").write_text("\ufeff" + text, encoding="utf-8")
    rows = from_file(tmp_path / "a.txt", Amount(10**6, 16), prompter.tokenizer, prompter.template)
    ids = prompter.tokenizer.encode(text, control=False)
    assert rows.flatten().tolist()[:16] == ids[:16]
    assert len(rows) == len(ids) // 16
    assert not set(rows.flatten().tolist()) & prompter.tokenizer.control_ids


def test_conversations_go_through_the_template(tmp_path: Path, prompter: Prompter) -> None:
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the world"}]
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps({"messages": turns}), "", json.dumps(turns)]) + "\n")
    rows = from_file(tmp_path / "a.jsonl", Amount(1, 10**6), prompter.tokenizer, prompter.template)
    assert prompter.template is not None
    from minicpm_cli.text.template import build_prompt

    messages = [Message("user", "hello"), Message("assistant", "the world")]
    once = build_prompt(prompter.tokenizer, prompter.template, messages, add_generation_prompt=False).ids
    assert rows[0].tolist() == once + once


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{bad", "line 2"),
        ('{"prompt": "x"}', 'expected {"messages"'),
        ("[]", "expected"),
        ('[{"role": "alien", "content": "x"}]', "role 'alien'"),
        ('[{"role": "user", "content": null}]', "is no text"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, prompter: Prompter, line: str, said: str) -> None:
    (tmp_path / "a.jsonl").write_text('[{"role": "user", "content": "x"}]\n' + line)
    with pytest.raises(UsageError) as caught:
        from_file(tmp_path / "a.jsonl", Amount(1, 8), prompter.tokenizer, prompter.template)
    assert said in str(caught.value)
    assert "line 2" in str(caught.value)


def test_files_that_cannot_be_used(tmp_path: Path, prompter: Prompter) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UsageError, match="holds 0 tokens"):
        from_file(tmp_path / "empty.txt", Amount(1, 8), prompter.tokenizer, None)
    with pytest.raises(FileError, match=r"bytes\.txt"):
        from_file(tmp_path / "bytes.txt", Amount(1, 8), prompter.tokenizer, None)
    (tmp_path / "a.jsonl").write_text('[{"role": "user", "content": "x"}]')
    with pytest.raises(UsageError, match="no chat template"):
        from_file(tmp_path / "a.jsonl", Amount(1, 8), prompter.tokenizer, None)


def test_too_few_tokens_are_refused_with_the_number(model: Path, tmp_path: Path) -> None:
    cfg = ModelConfig.from_hf(checkpoint_config("minicpm5-1b"))
    assert floor(cfg, Recipe()) == 2 * 576
    assert floor(cfg, Recipe(skip=("*.down_proj",))) == 2 * 256
    check_amount(1152, cfg, Recipe())
    check_amount(1151, cfg, Recipe(force=True))
    with pytest.raises(UsageError, match="1151 calibration tokens are too few: below 1152, 2 for each input"):
        check_amount(1151, cfg, Recipe())
    with pytest.raises(UsageError, match="128 calibration tokens"):
        quantize(job_of(model, tmp_path / "out", samples=4), silent)
    report = quantize(job_of(model, tmp_path / "out", samples=4, force=True), silent)
    assert report.calibration_tokens == 128


def test_an_expert_of_a_mixture_does_not_set_the_floor() -> None:
    cfg = ModelConfig.from_hf(checkpoint_config("minicpm-moe-8x2b"))
    assert floor(cfg, Recipe()) == 2 * cfg.hidden_size


def test_the_amount_follows_the_device_and_the_context() -> None:
    cfg = ModelConfig.from_hf(checkpoint_config("minicpm5-1b"))
    assert amount(Recipe(calib="a.txt"), cfg, cuda=True) == Amount(128, 2048)
    assert amount(Recipe(), cfg, cuda=True).tokens < amount(Recipe(calib="a.txt"), cfg, cuda=True).tokens
    assert amount(Recipe(samples=3, seqlen=7), cfg, cuda=False) == Amount(3, 7)
    short = ModelConfig.from_hf(checkpoint_config("minicpm5-1b") | {"max_position_embeddings": 100})
    assert amount(Recipe(), short, cuda=False) == Amount(32, 100)
    wide = ModelConfig.from_hf(checkpoint_config("minicpm4-8b", exact=True))
    assert amount(Recipe(), wide, cuda=False) == Amount(64, 512)  # 2 x 16384 inputs
    mixed = ModelConfig.from_hf(checkpoint_config("minicpm-moe-8x2b", exact=True))
    assert amount(Recipe(), mixed, cuda=True).tokens >= 1.5 * 2 * 5760 * 8 / 2
    with pytest.raises(UsageError, match="--seqlen 101 is more than the model's context of 100"):
        amount(Recipe(seqlen=101), short, cuda=False)


def test_the_models_own_samples_are_the_wanted_rows_and_depend_on_the_seed(prompter: Prompter) -> None:
    wanted = Amount(6, 64)
    one, same, other = (model_samples(prompter, wanted, seed, CPU, lambda done, total: None) for seed in (1, 1, 2))
    assert one.shape == (6, 64)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert int(one.max()) < prompter.checkpoint.cfg.vocab


def test_a_sample_begins_with_its_prompt_and_goes_on_as_the_model_does(model: Path, prompter: Prompter) -> None:
    decoder = loaded(model, torch.bfloat16)
    prompt = [5, 6, 7]
    rows = own_samples(decoder, [prompt], frozenset(), Amount(2, 128), 3, lambda done, total: None)
    assert rows.shape == (2, 128)
    assert rows[0, :3].tolist() == prompt
    assert rows[1, :3].tolist() == prompt
    assert rows[0].tolist() != rows[1].tolist()
    likeliest = all_logits(decoder, rows[0].tolist()).softmax(-1)[:-1].gather(-1, rows[0, 1:, None])
    uniform = 1 / decoder.cfg.vocab
    assert float(likeliest[3:].log().mean().exp()) > 1.5 * uniform  # drawn from the model, not at random


def test_every_kind_of_prompt_is_there(prompter: Prompter) -> None:
    found = openings(prompter.tokenizer, prompter.template)
    assert [prompter.tokenizer.bos_id] in found
    texts = [prompter.tokenizer.decode(ids) for ids in found]
    assert sum("<|im_start|>user" in text for text in texts) == 32
    assert sum(text.startswith("<s>Once upon") for text in texts) == 1
    assert len(openings(prompter.tokenizer, None)) == len(found)


def test_seats_fit_the_cache() -> None:
    for family in ("minicpm-2b", "minicpm3-4b", "minicpm5-1b"):
        cfg = ModelConfig.from_hf(checkpoint_config(family, exact=True, layers=40))
        seating = Seating.of(cfg, 2, Amount(64, 512))
        assert seating.seats * seating.length * cfg.kv_bytes_per_token(2) <= CACHE_BYTES
        assert seating.length >= 128
