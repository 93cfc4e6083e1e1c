"""Tiny tokenizers as the real ones are: SentencePiece-like with byte fallback (1.0 to 4.1), byte-level BPE (5)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from checkpoint_configs import chatml

OLD_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{'<用户>' + message['content'].strip() + '<AI>'}}{% else %}{{message['content'].strip()}}{% endif %}{% endfor %}"
)
CHATML_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
THINK_SWITCH = (
    "{% if add_generation_prompt %}{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
THINK_ALWAYS = THINK_SWITCH.replace("{% endif %}{% endif %}", "{% else %}{{ '<think>\\n' }}{% endif %}{% endif %}")
MERGES = "h e|t h|th e|i n|a n|an d|o r|e r|o n|l l|he ll|hell o|w or|wor l|worl d|r e|s t|a t|o u|y ou"
SPM_MERGES = "▁ the|▁ and|▁ you|▁ world|▁ hello"
CHATML_TOKENS = ("<|im_end|>", "<|im_start|>", "<|tool_call|>", "<|execute_start|>", "<|execute_end|>")
FIVE_HEAD = ("<s>", "</s>", "<unk>", "<pad>", "<function", "</function>", "<param", "</param>", "<think>", "</think>")
FIVE_TAIL = ("<|im_start|>", "<|im_end|>", "<tool_response>", "</tool_response>")


@dataclass(frozen=True, slots=True)
class TinyTokenizer:
    tokenizer: Tokenizer
    template: str
    kind: str  # llama.cpp's tokenizer.ggml.model: "llama" or "gpt2"
    merges: list[tuple[str, str]]
    specials: dict[str, int]

    @property
    def size(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    @property
    def im_end(self) -> int | None:
        return self.specials.get("<|im_end|>")

    def tokens(self) -> list[str]:
        return [self.tokenizer.id_to_token(i) for i in range(self.size)]


def tokenizer_of(family: str) -> TinyTokenizer:
    return _byte_level() if family == "minicpm5-1b" else _spm(family)


def _with_merges(vocab: dict[str, int], text: str) -> list[tuple[str, str]]:
    merges = [tuple(pair.split(" ")) for pair in text.split("|")]
    for a, b in merges:
        vocab.setdefault(a + b, len(vocab))
    return merges  # type: ignore[return-value]


def _spm(family: str) -> TinyTokenizer:
    vocab = {token: i for i, token in enumerate(("<unk>", "<s>", "</s>"))}
    for text in (*(f"<0x{b:02X}>" for b in range(256)), "▁", *map(chr, range(33, 127)), "用", "户"):
        vocab.setdefault(text, len(vocab))
    merges = _with_merges(vocab, f"{MERGES}|{SPM_MERGES}")
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    names = ("<unk>", "<s>", "</s>", *(CHATML_TOKENS if chatml(family) else ()))
    tokenizer.add_special_tokens([AddedToken(n, normalized=False, special=True) for n in names])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    template = OLD_TEMPLATE
    if chatml(family):
        template = CHATML_TEMPLATE + (THINK_SWITCH if family == "minicpm4.1-8b" else "")
    return TinyTokenizer(tokenizer, template, "llama", merges, {n: tokenizer.token_to_id(n) for n in names})


def _byte_level() -> TinyTokenizer:
    vocab = {token: i for i, token in enumerate(FIVE_HEAD)}
    for char in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab.setdefault(char, len(vocab))
    merges = _with_merges(vocab, f"{MERGES}|{SPM_MERGES}".replace("▁", "Ġ"))
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = (*FIVE_HEAD, *FIVE_TAIL)
    tokenizer.add_special_tokens([AddedToken(n, normalized=False, special=True) for n in names])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
    )
    template = "<s>" + CHATML_TEMPLATE + THINK_ALWAYS
    return TinyTokenizer(tokenizer, template, "gpt2", merges, {n: tokenizer.token_to_id(n) for n in names})


def write_tokenizer(folder: Path, family: str) -> TinyTokenizer:
    """tokenizer.json and tokenizer_config.json (and chat_template.jinja for generation 5, as published)."""
    tiny = tokenizer_of(family)
    tiny.tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast" if tiny.kind == "gpt2" else "LlamaTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(i): {"content": n, "lstrip": False, "normalized": False, "rstrip": False, "special": True}
            for n, i in tiny.specials.items()
        },
    }
    if tiny.kind == "gpt2":
        (folder / "chat_template.jinja").write_text(tiny.template, encoding="utf-8")
    else:
        config["chat_template"] = tiny.template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=1), encoding="utf-8")
    return tiny
