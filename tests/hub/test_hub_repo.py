"""Repositories over real HTTP from a small hub on 127.0.0.1: whole, torn, absent, and offline from the cache."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from checkpoints import write_checkpoint

SHA = "a" * 40
REPO = "org/tiny"


@dataclass
class Hub:
    """What the hub serves, and how it misbehaves: `cut` names a file whose body ends half-way."""

    files: dict[str, bytes]
    url: str = ""
    status: int = 200
    cut: str = ""
    asked: list[str] = field(default_factory=list)


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:  # noqa: C901
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            hub.asked.append(path)
            if hub.status != 200:
                self.answer(b"{}", hub.status, {"X-Error-Code": "GatedRepo" if hub.status == 401 else "RepoNotFound"})
            elif path.startswith("/api/models/") and "/tree/" in path:
                rows = [{"type": "file", "path": n, "size": len(b), "oid": oid(b)} for n, b in hub.files.items()]
                self.answer(json.dumps(rows).encode(), 200, {})
            elif path.startswith("/api/models/"):
                siblings = [{"rfilename": n, "size": len(b), "blobId": oid(b)} for n, b in hub.files.items()]
                self.answer(json.dumps({"id": REPO, "sha": SHA, "siblings": siblings}).encode(), 200, {})
            else:
                self.file(path.rpartition("/")[2])

        def file(self, name: str) -> None:
            body = hub.files[name]
            headers = {"X-Repo-Commit": SHA, "ETag": f'"{oid(body)}"', "Accept-Ranges": "bytes"}
            if name == hub.cut and self.command == "GET":
                self.send_response(200)
                for key, value in (headers | {"Content-Length": str(len(body))}).items():
                    self.send_header(key, value)
                self.end_headers()
                self.wfile.write(body[: len(body) // 2])
                self.close_connection = True
            else:
                self.answer(body, 200, headers)

        def answer(self, body: bytes, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    return Handler


def oid(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = write_checkpoint(tmp_path / "published", "minicpm4-0.5b", fmt="sharded")
    served = Hub({p.name: p.read_bytes() for p in folder.iterdir()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler(served)) as server:
        served.url = f"http://127.0.0.1:{server.server_port}"
        Thread(target=server.serve_forever, daemon=True).start()
        yield served
        server.shutdown()


def pull(hub: Hub, home: Path, name: str = REPO, **environ: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"HF_HOME": str(home), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"} | environ
    env.pop("HF_HUB_OFFLINE", None) if "HF_HUB_OFFLINE" not in environ else None
    command = [sys.executable, "-m", "minicpm_cli", "pull", name]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False, stdin=subprocess.DEVNULL)


def test_a_repository_is_fetched_without_its_code(hub: Hub, tmp_path: Path) -> None:
    done = pull(hub, tmp_path / "home")
    assert done.returncode == 0, done.stderr
    there = {p.name for p in Path(done.stdout.strip()).iterdir()}
    assert there == {n for n in hub.files if not n.endswith(".py")}


def test_offline_from_the_cache_and_what_is_missing_by_name(hub: Hub, tmp_path: Path) -> None:
    first = pull(hub, tmp_path / "home")
    asked = len(hub.asked)
    again = pull(hub, tmp_path / "home", HF_HUB_OFFLINE="1")
    assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr
    assert len(hub.asked) == asked
    shard = sorted(Path(first.stdout.strip()).glob("*.safetensors"))[1]
    shard.unlink()
    torn = pull(hub, tmp_path / "home", HF_HUB_OFFLINE="1")
    assert torn.returncode == 3
    assert shard.name in torn.stderr


def test_a_cut_connection_leaves_nothing_that_looks_whole(hub: Hub, tmp_path: Path) -> None:
    hub.cut = next(n for n in sorted(hub.files) if n.endswith(".safetensors"))
    assert pull(hub, tmp_path / "home").returncode == 3
    assert pull(hub, tmp_path / "home", HF_HUB_OFFLINE="1").returncode == 3
    hub.cut = ""
    done = pull(hub, tmp_path / "home")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("status", "words"), [(404, "does not exist"), (401, "gated")])
def test_refusals_by_the_hub(hub: Hub, tmp_path: Path, status: int, words: str) -> None:
    hub.status = status
    done = pull(hub, tmp_path / "home")
    assert done.returncode == 3
    assert words in done.stderr


def test_no_network_and_nothing_in_the_cache(tmp_path: Path) -> None:
    done = pull(Hub({}, url="http://127.0.0.1:9"), tmp_path / "home")
    assert done.returncode == 3
    assert "not in the cache" in done.stderr


def test_unknown_names_suggest(tmp_path: Path) -> None:
    done = pull(Hub({}), tmp_path, "minicpm4-05b")
    assert done.returncode == 3
    assert "minicpm4-0.5b" in done.stderr
