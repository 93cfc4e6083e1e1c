"""The whole command line with a fake model, as a program: `python tests/fake_cli.py SECONDS_A_TOKEN ARGS...`.

It answers the names in ANSWERS with those texts, and anything else with an echo. Asked "think", it thinks first; asked
"read", it never has done with reading. The model named "heavy" never has done with loading.
"""

from __future__ import annotations

import sys
import time

from fakes import FakeLLM, echo
from minicpm_cli.chat.terminal import Terminal
from minicpm_cli.cli import main
from minicpm_cli.cli.runtime import Runtime
from minicpm_cli.settings import Settings
from minicpm_cli.types import Request

NASTY = "a\x1b[2J\x1b]0;owned\x07b\x9b31mc\u202ed\x08\x7f\re"
ANSWERS = {
    "many": "\n".join(f"line {n}" for n in range(1, 101)),
    "paragraphs": "\n\n".join(f"paragraph {n} is **bold**" for n in range(1, 61)),
    "code": "Here:\n```python\nprint(1)\n```\nDone.",
    "table": "| n | what |\n|--:|---|\n" + "\n".join(f"| {n} | row {n} |" for n in range(1, 101)),
    "program": "```python\n" + "\n".join(f"line = {n}  # of a hundred" for n in range(1, 101)) + "\n```",
    "nasty": f"{NASTY}\n```\n{NASTY}\n```\n| {NASTY} |\n|---|\n| {NASTY} |\n",
    "wide": "你好，**世界**！这是一个很长的句子，看看它在哪里换行。\n\n- e\u0301 é 👍🏽 한국어\n- x 👨\u200d👩\u200d👧",
    "circles": "Round and round it goes. " * 100,
}
THOUGHT = " ".join(f"thought {n}" for n in range(1, 101))


def asked(request: Request) -> str:
    return echo(request).removeprefix("You said: ")


def answer(request: Request) -> str:
    if asked(request) == "read":
        _wait("[reading]")
    return ANSWERS.get(asked(request), echo(request))


def thought(request: Request) -> str:
    return {"think": THOUGHT, "nasty": NASTY}.get(asked(request), "")


def _wait(what: str) -> None:
    sys.stderr.write(what)
    sys.stderr.flush()
    time.sleep(60)


if __name__ == "__main__":
    llm = FakeLLM(answer=answer, thought=thought, delay=float(sys.argv[1]), open_texts=FakeLLM)

    def opened(settings: Settings, terminal: Terminal) -> FakeLLM:
        llm.context = settings.options.ctx or llm.context
        if settings.options.model == "heavy":
            _wait("[loading]")
        return llm

    main(sys.argv[2:], Runtime(open_llm=opened, open_prompts=opened))
