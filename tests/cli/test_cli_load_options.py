"""Each option of loading reaches whoever opens the model, as its flag says it."""

from __future__ import annotations

import io
from typing import Any

import pytest

from fakes import FakeLLM
from minicpm_cli.cli import exit_code
from minicpm_cli.cli.runtime import Runtime
from minicpm_cli.settings import LoadOptions, Settings

FLAGS = [
    ("--quantize nf4", "quantize", "nf4"),
    ("--head-bits 8", "head_bits", 8),
    ("--kv-dtype int8", "kv_dtype", "int8"),
    ("--dtype fp32", "dtype", "fp32"),
    ("--device cuda:1", "device", "cuda:1"),
    ("--ctx 777", "ctx", 777),
    ("--max-seqs 3", "max_seqs", 3),
    ("--memory-fraction 0.5", "memory_fraction", 0.5),
    ("--no-graphs", "graphs", False),
    ("--graphs", "graphs", True),
    ("--chat-template minicpm", "chat_template", "minicpm"),
    ("-m /some/folder", "model", "/some/folder"),
    ("--model-path /some/folder", "model", "/some/folder"),
]


@pytest.mark.parametrize(("flag", "name", "value"), FLAGS, ids=[flag for flag, _, _ in FLAGS])
@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_flag_is_what_the_model_is_opened_with(
    command: str, flag: str, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[LoadOptions] = []

    def opens(settings: Settings, terminal: object) -> FakeLLM:
        opened.append(settings.options)
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hi\n")))
    assert exit_code([command, "-q", *flag.split()], Runtime(open_llm=opens, open_prompts=opens)) == 130
    assert [getattr(options, name) for options in opened] == [value]
