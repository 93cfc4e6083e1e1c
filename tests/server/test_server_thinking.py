"""An answer that the limit cuts while the model still thinks is no empty one over HTTP either."""

from __future__ import annotations

from fakes import FakeLLM

ASKED = [{"role": "user", "content": "hello"}]


def test_thoughts_that_the_limit_cuts_are_told(serve) -> None:
    client = serve(FakeLLM(thought=lambda request: "let me see what that is")).client()
    choice = client.chat.completions.create(model="fake", messages=ASKED, max_tokens=3).choices[0]
    assert choice.message.reasoning_content == "let me see"
    assert (choice.message.content, choice.finish_reason) == ("", "length")
    chunks = list(client.chat.completions.create(model="fake", messages=ASKED, max_tokens=3, stream=True))
    assert "".join(getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks) == "let me see"
    assert not any(c.choices[0].delta.content for c in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"
