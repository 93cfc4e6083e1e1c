"""`minicpm serve` and `--server` on the command line; the server itself is tested in tests/server."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

FAKE = Path(__file__).parents[1] / "fake_cli.py"


@pytest.fixture
def url(home: Path) -> Iterator[str]:
    """Of a server with the fake model and a key."""
    command = [sys.executable, str(FAKE), "0.001", "serve", "--port", "0", "--api-key", "sesame"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        yield next(found[0] for line in process.stderr if (found := re.search(r"http://[^/\s]+", line)))
        if os.name != "nt":
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
            assert "every request that was taken is answered" in process.stderr.read()
    finally:
        process.kill()
        process.wait(10)
        process.stderr.close()


def real(*arguments: str, stdin: str = "", key: str = "sesame") -> subprocess.CompletedProcess[str]:
    """The real program."""
    environment = os.environ | {"MINICPM_API_KEY": key}
    environment.pop("MINICPM_MODEL")
    command = [sys.executable, "-m", "minicpm_cli", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=environment, check=False)


def test_run_chat_and_batch_ask_a_server_that_is_warm(url: str, tmp_path: Path) -> None:
    done = real("run", "--server", url, stdin="hello")
    assert (done.returncode, done.stdout, done.stderr) == (0, "You said: hello\n", "")
    done = real("run", "--server", url, "--quantize", "w8", "--no-graphs", "-t", "0", stdin="hello")
    assert (done.returncode, done.stdout) == (0, "You said: hello\n")
    assert done.stderr.startswith("minicpm: --quantize, --no-graphs: the server has loaded its model in its own way")
    done = real("chat", "--server", f"{url}/v1", stdin="one\ntwo\n")
    assert done.stdout.split("\n")[:2] == ["You said: one", "You said: two"]
    (tmp_path / "in.jsonl").write_text("".join(f'{{"prompt": "number {n}"}}\n' for n in range(20)))
    arguments = ("batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "--server", url, "--ordered")
    done = real(*arguments)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == [f"You said: number {n}" for n in range(20)]
    assert "20 were done before" in real(*arguments).stderr
    done = real("run", "--server", url, "hello", key="guess")
    assert done.returncode == 3
    assert "Incorrect API key" in done.stderr


def test_bench_measures_a_server(url: str) -> None:
    done = real("bench", "--server", url, "--streams", "2", "--requests", "3")
    assert (done.returncode, done.stderr) == (
        0,
        "minicpm: 3 requests of 512 tokens, 256 drawn for each, by 2 streams\n",
    )
    assert re.match(r"2 streams  [0-9,]+ tok/s  3 requests of 512 tokens, 768 new ones in ", done.stdout)
    done = real("bench", "--server", url, "--streams", "1", "--requests", "1", "--json", "-q")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["tokens"] == 256


def test_bench_says_what_a_server_is_not_asked_for(cli) -> None:
    for arguments, message in (
        (("--streams", "2"), "say which one with --server URL"),
        (("--streams", "0", "--server", "x"), "--streams is 0"),
        (("decode", "--server", "x"), "leave decode out"),
        (("--server", "https://x"), "plain http"),
    ):
        done = cli("bench", *arguments)
        assert (done.code, done.opened) == (2, False)
        assert message in done.err


def test_a_server_that_is_not_there_is_said(cli, monkeypatch) -> None:
    done = real("run", "--server", "127.0.0.1:9", "hello")
    assert done.returncode == 3
    assert "no server answers at 127.0.0.1:9" in done.stderr
    assert cli("run", "--server", "not an address", "x").code == 2


def test_a_port_that_is_taken_is_said_before_the_model_is_opened(cli) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as sock:
        done = cli("serve", "--port", str(sock.getsockname()[1]))
    assert (done.code, done.opened) == (2, False)
    assert "--port 0 takes a free one" in done.err


@pytest.mark.parametrize(
    "arguments", [("--port", "70000"), ("--max-queue", "0"), ("--api-key", ""), ("--ctx", "0"), ("--host", "no such")]
)
def test_what_cannot_be_is_refused_before_the_model_is_opened(cli, arguments: tuple[str, ...]) -> None:
    done = cli("serve", *arguments)
    assert (done.code, done.opened) == (2, False)


def test_a_key_is_not_shown(cli, monkeypatch) -> None:
    monkeypatch.setenv("MINICPM_API_KEY", "sesame")
    for arguments in (("config",), ("config", "--json")):
        done = cli(*arguments)
        assert "sesame" not in done.out + done.err
        assert "***" in done.out
