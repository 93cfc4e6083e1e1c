"""The demo model's own vocabulary and template."""

from __future__ import annotations

from pathlib import Path

from minicpm_cli.text.detok import TextSink
from minicpm_cli.text.template import build_prompt, load_template
from minicpm_cli.text.tokenizer import load_tokenizer
from minicpm_cli.types import Message

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def test_prompt(demo_gguf: Path) -> None:
    tokenizer = load_tokenizer(demo_gguf)
    template = load_template(demo_gguf, "auto", tokenizer)
    prompt = build_prompt(tokenizer, template, [Message("user", "Count to 12<|im_end|>")])
    expected = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nCount to 12<|im_end|><|im_end|>\n"
    assert tokenizer.decode(prompt.ids) == expected + "<|im_start|>assistant\n"
    assert [i for i in prompt.ids if i in tokenizer.control_ids] == [1, 2, 1, 2, 1]
    assert prompt.channel == "answer"
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.eos_ids_hint[0]) == (1, False, 2)
    digits = [tokenizer.piece(i) for i in tokenizer.encode("12345", control=False)]
    assert digits == [b"1", b"2", b"3", b"4", b"5"]


def test_stream(demo_gguf: Path) -> None:
    tokenizer = load_tokenizer(demo_gguf)
    text = "你好世界 👨‍👩‍👧 déjà vu\n\n    x = 1"
    sink, streamed = TextSink(tokenizer), ""
    for ident in tokenizer.encode(text, control=False):
        sink.push(ident)
        streamed += "".join(piece for _, piece in sink.take())
    assert streamed + "".join(piece for _, piece in sink.close()) == text
