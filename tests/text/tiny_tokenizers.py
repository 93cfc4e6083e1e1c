"""Small tokenizers, trained on a few lines, in the shapes that the family's checkpoints have."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

LINES = [
    "The quick brown fox jumps over the lazy dog. Numbers 1234 and 56.",
    "def main():\n    return {'a': [1, 2]}\n\n# a comment",
    "你好,世界。今天天气很好,我们去公园。",
    "user system assistant think function name end start im | < > / Say BOO answer: the <b>bold</b> one",
    "🎉 emoji 👨‍👩‍👧 family — dashes … and “quotes”",
] * 4

# ids 0, 1, 2, ... in this order
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<think>", "</think>", "<function", "</function>"]
TEXT = ["    ", "<b>"]

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MINICPM2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{'<用户>' + message['content'].strip() + '<AI>'}}"
    "{% else %}{{message['content'].strip()}}{% endif %}{% endfor %}"
)
# Emits <s> itself, splits thoughts off old answers, opens or closes the think block: what MiniCPM5's template does.
MINICPM5 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if reasoning and loop.last %}{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
        {{- content.lstrip('\\n') + '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}
"""


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[*SPECIAL, *MARKUP, *TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    raw = json.loads(tokenizer.to_str())
    for token in raw["added_tokens"]:
        token["special"] = token["content"] in SPECIAL
    return Tokenizer.from_str(json.dumps(raw))


def byte_level_folder(folder: Path, template: str = CHATML, **config: Any) -> Path:
    """As MiniCPM4 and 5: tokenizer.json, ChatML tokens, think tags that are not special."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_level().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|im_end|>"}
    write_config(folder, settings | {"chat_template": template} | config)
    return folder


def with_post_processor(folder: Path) -> Path:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def sentencepiece_folder(folder: Path, kind: str = "bpe", template: str = MINICPM2, **config: Any) -> Path:
    """As MiniCPM 1 and 2: tokenizer.model with byte fallback, <用户> and <AI> as user-defined symbols."""
    folder.mkdir(parents=True, exist_ok=True)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter([line.replace("\n", " ") for line in LINES]),
        model_writer=model,
        model_type=kind,
        vocab_size=420,
        byte_fallback=True,
        user_defined_symbols=["<用户>", "<AI>", "\n"],
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    write_config(folder, settings | {"chat_template": template} | config)
    return folder


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
