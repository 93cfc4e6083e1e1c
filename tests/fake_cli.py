"""The whole command line with a fake model, as a program: `python tests/fake_cli.py SECONDS_A_TOKEN ARGS...`.

The fake answers "many" with a hundred numbered lines, "code" with a code block, and anything else with an echo.
"""

from __future__ import annotations

import sys

from fakes import FakeLLM, echo
from minicpm_cli.chat.terminal import Terminal
from minicpm_cli.cli import main
from minicpm_cli.cli.runtime import Runtime
from minicpm_cli.settings import Settings
from minicpm_cli.types import Request


def answer(request: Request) -> str:
    asked = echo(request).removeprefix("You said: ")
    if asked == "many":
        return "\n".join(f"line {n}" for n in range(1, 101))
    if asked == "paragraphs":
        return "\n\n".join(f"paragraph {n} is **bold**" for n in range(1, 61))
    if asked == "code":
        return "Here:\n```python\nprint(1)\n```\nDone."
    return echo(request)


if __name__ == "__main__":
    llm = FakeLLM(answer=answer, delay=float(sys.argv[1]))

    def opened(settings: Settings, terminal: Terminal) -> FakeLLM:
        llm.context = settings.options.ctx or llm.context
        return llm

    main(sys.argv[2:], Runtime(open_llm=opened, open_prompts=opened))
