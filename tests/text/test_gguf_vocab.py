"""The tokenizer out of GGUF metadata equals the one that the file was made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from tiny_tokenizers import CHATML, LINES, MARKUP, SPECIAL, sentencepiece_folder
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from minicpm_cli.errors import TokenizerError
from minicpm_cli.text.template import load_template
from minicpm_cli.text.tokenizer import load_tokenizer

TEXTS = [
    "The quick brown fox 1234567 don't DON'T",
    "  indented\n\n\ttabs  \r\n end ",
    "世界 你好,世界。12年",
    "a  b   c\u3000d _x_ 'll 'LL x² ½",
    "def f(x):\n    return x  # 99\n\n\n",
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
byte_level = pre_tokenizers.ByteLevel


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level(False, use_regex=False)]
    return pre_tokenizers.Sequence(parts)


PRE: dict[str, pre_tokenizers.PreTokenizer] = {
    "gpt-2": byte_level(False),
    "default": byte_level(False),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level(False)]),
    "llama-bpe": split(LLAMA3),
    "minicpm5": split(LLAMA3),
    "qwen2": split(QWEN2),
}


def trained(pre: pre_tokenizers.PreTokenizer, ignore_merges: bool) -> FastTokenizer:
    tokenizer = FastTokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=[*SPECIAL, *MARKUP, "    "],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES + TEXTS, trainer)
    return tokenizer


def write(path: Path, metadata: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        name = f"tokenizer.{key}" if key == "chat_template" else f"tokenizer.ggml.{key}"
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}.get(type(value), writer.add_array)
        add(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_metadata(tokenizer: FastTokenizer, pre: str) -> dict[str, Any]:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    types = [3 if t in SPECIAL else 4 if t in (*MARKUP, "    ") else 1 for t in tokens]
    merges = [" ".join(pair) for pair in model["merges"]]
    ids = {"bos_token_id": 0, "eos_token_id": 3}
    return {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges, **ids}


@pytest.mark.parametrize("pre", PRE)
def test_byte_level(tmp_path: Path, pre: str) -> None:
    original = trained(PRE[pre], pre in ("llama-bpe", "minicpm5"))
    ours = load_tokenizer(write(tmp_path / "m.gguf", byte_level_metadata(original, pre)))
    for text in TEXTS:
        assert ours.encode(text, control=False) == original.encode(text).ids
    marked = "<|im_start|>user\n1234    <think>x</think><|im_end|>"
    assert ours.encode(marked, control=True) == original.encode(marked).ids
    assert not ours.control_ids & set(ours.encode(marked, control=False))
    assert ours.control_ids == set(range(len(SPECIAL) + len(MARKUP)))
    assert (ours.bos_id, ours.eos_ids_hint[0], ours.add_bos) == (0, 3, pre == "llama-bpe")


def test_add_bos_of_the_file_decides(tmp_path: Path) -> None:
    metadata = byte_level_metadata(trained(PRE["gpt-2"], False), "gpt-2")
    assert load_tokenizer(write(tmp_path / "m.gguf", metadata | {"add_bos_token": True})).add_bos


def test_unknown_pre_tokenizer(tmp_path: Path) -> None:
    metadata = byte_level_metadata(trained(PRE["gpt-2"], False), "brand-new")
    with pytest.raises(TokenizerError, match=r"pre-tokenizer 'brand-new'.*known are .*smollm"):
        load_tokenizer(write(tmp_path / "m.gguf", metadata))


def test_unknown_model(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="tokenizer model 'rwkv' is not supported"):
        load_tokenizer(write(tmp_path / "m.gguf", {"model": "rwkv", "tokens": ["a"]}))


def test_no_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no vocabulary"):
        load_tokenizer(write(tmp_path / "m.gguf", {"model": "gpt2"}))


@pytest.fixture(scope="module")
def spm_metadata(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Any]:
    import sentencepiece

    folder = sentencepiece_folder(tmp_path_factory.mktemp("spm"))
    original = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    ids = range(original.vocab_size())
    kinds = [
        2 if original.is_unknown(i) else 3 if original.is_control(i) else 6 if original.is_byte(i) else 1 for i in ids
    ]
    tokens = [original.id_to_piece(i) for i in ids]
    kinds = [4 if token in ("<用户>", "<AI>", "\n") else kind for token, kind in zip(tokens, kinds, strict=True)]
    scores = [original.get_score(i) for i in ids]
    metadata = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds}
    return metadata | {"bos_token_id": 1, "eos_token_id": 2}, original


def test_sentencepiece(tmp_path: Path, spm_metadata: tuple[dict[str, Any], Any]) -> None:
    metadata, original = spm_metadata
    ours = load_tokenizer(write(tmp_path / "m.gguf", metadata))
    assert ours.add_bos
    for text in TEXTS:
        text = text.replace("\n", " ")
        assert ours.encode(text, control=False) == original.encode(text)
    text = "a<用户>b</s>"
    assert not ours.control_ids & set(ours.encode(text, control=False))
    assert ours.decode(ours.encode(text, control=False)) == " " + text
    assert {ours.token_id("<用户>"), ours.token_id("</s>")} <= set(ours.encode(text, control=True))


def test_no_space_before_the_text(tmp_path: Path, spm_metadata: tuple[dict[str, Any], Any]) -> None:
    metadata, _ = spm_metadata
    ours = load_tokenizer(write(tmp_path / "m.gguf", metadata | {"add_space_prefix": False, "add_bos_token": False}))
    assert ours.decode(ours.encode("the fox", control=False)) == "the fox"
    assert not ours.add_bos


def test_runs_of_spaces_are_text(tmp_path: Path) -> None:
    space = "\u2581"
    metadata = {
        "model": "llama",
        "tokens": ["<unk>", space, "a", space * 4],
        "scores": [0.0, -1.0, -2.0, 0.0],
        "token_type": [2, 1, 1, 4],
        "add_space_prefix": False,
    }
    ours = load_tokenizer(write(tmp_path / "m.gguf", metadata))
    assert ours.encode("a    a a", control=False) == [2, 3, 2, 1, 2]
    assert ours.decode([2, 3, 2]) == "a    a"


def test_template(tmp_path: Path) -> None:
    metadata = byte_level_metadata(trained(PRE["gpt-2"], False), "gpt-2") | {"chat_template": CHATML}
    path = write(tmp_path / "m.gguf", metadata)
    assert load_template(path, "auto", load_tokenizer(path)).source == CHATML
