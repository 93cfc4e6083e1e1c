"""A model hub on 127.0.0.1 that speaks what huggingface_hub asks, and breaks off, lies or refuses on request."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
LFS_FROM = 4096  # bytes; like the real hub, large files are known by their SHA-256


class FakeHub:
    """One repository `name` with `files`. What to do wrong is set on the attributes.

    `cuts`: file -> how often its transfer breaks off half-way. `announced`: file -> a size that is not true.
    `gone`: files that are listed but cannot be fetched. `token`: needed for files. `status`: answer to everything.
    `ignores_ranges`: whole files are sent whatever part was asked for.
    """

    def __init__(self, name: str, files: dict[str, bytes]) -> None:
        self.name, self.files, self.commit = name, files, COMMIT
        self.cuts: Counter[str] = Counter()
        self.announced: dict[str, int] = {}
        self.gone: set[str] = set()
        self.token: str | None = None
        self.status: int | None = None
        self.requests: list[str] = []  # "GET /path", in order
        self.ranges: list[str] = []
        self.ignores_ranges = False
        self.url = ""

    def fetched(self) -> list[str]:
        """The files whose bytes were asked for."""
        return [r.rpartition("/")[2] for r in self.requests if r.startswith("GET") and "/resolve/" in r]

    def hashes(self, file: str) -> tuple[str, str | None]:
        """(git blob id, SHA-256 when it is a large file)."""
        data = self.files[file]
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        return blob, hashlib.sha256(data).hexdigest() if len(data) >= LFS_FROM else None

    def size(self, file: str) -> int:
        return self.announced.get(file, len(self.files[file]))

    def info(self) -> dict[str, Any]:
        siblings = []
        for file in self.files:
            blob, sha = self.hashes(file)
            entry: dict[str, Any] = {"rfilename": file, "size": self.size(file), "blobId": blob}
            if sha:
                entry["lfs"] = {"size": self.size(file), "sha256": sha, "pointerSize": 130}
            siblings.append(entry)
        return {"_id": "1", "id": self.name, "modelId": self.name, "sha": self.commit, "siblings": siblings}

    def tree(self) -> list[dict[str, Any]]:
        entries = []
        for file in self.files:
            blob, sha = self.hashes(file)
            entry: dict[str, Any] = {"type": "file", "path": file, "size": self.size(file), "oid": blob}
            if sha:
                entry["lfs"] = {"size": self.size(file), "oid": sha, "pointerSize": 130}
            entries.append(entry)
        return entries


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def _serve(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if self.hub.status is not None:
            self._error(self.hub.status, "")
        elif path.startswith(f"/api/models/{self.hub.name}"):
            self._api(path.removeprefix(f"/api/models/{self.hub.name}"))
        elif path.startswith(f"/{self.hub.name}/resolve/"):
            self._file(*path.removeprefix(f"/{self.hub.name}/resolve/").split("/", 1))
        else:
            self._error(404, "RepoNotFound")

    def _api(self, rest: str) -> None:
        revision = rest.rpartition("/")[2] or "main"
        if revision not in ("main", "v1", self.hub.commit):
            self._error(404, "RevisionNotFound")
        elif rest.startswith("/tree/"):
            self._send(200, json.dumps(self.hub.tree()).encode(), {"Content-Type": "application/json"})
        else:
            self._send(200, json.dumps(self.hub.info()).encode(), {"Content-Type": "application/json"})

    def _file(self, revision: str, file: str) -> None:
        if self.hub.token is not None and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._error(403 if self.headers.get("Authorization") else 401, "GatedRepo")
        elif file not in self.hub.files or file in self.hub.gone:
            self._error(404, "EntryNotFound")
        else:
            self._bytes(file)

    def _bytes(self, file: str) -> None:
        data, (blob, sha) = self.hub.files[file], self.hub.hashes(file)
        headers = {"ETag": f'"{sha or blob}"', "X-Repo-Commit": self.hub.commit, "Accept-Ranges": "bytes"}
        headers["X-Linked-Size"] = str(self.hub.size(file))
        status, start, end = 200, 0, len(data)
        if self.command == "GET" and (wanted := self.headers.get("Range")) and not self.hub.ignores_ranges:
            self.hub.ranges.append(wanted)
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            status, start, end = 206, int(first), min(int(last) + 1, len(data)) if last else len(data)
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        cut = self.command == "GET" and self.hub.cuts[file] > 0
        self._send(status, data[start:end], headers, cut=cut)
        if cut:
            self.hub.cuts[file] -= 1

    def _error(self, status: int, code: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": "as asked"} if code else {}
        self._send(status, b"", headers | {"X-Repo-Commit": self.hub.commit})

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            with suppress(ConnectionError):  # who has read enough goes
                self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    """The hub at `hub.url` until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
