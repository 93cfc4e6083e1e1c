"""Where a server listens. The socket is there before the model is, and before the process that serves at it."""

from __future__ import annotations

import errno
import socket
import sys

from minicpm_cli.errors import UsageError


def bind(host: str, port: int) -> socket.socket:
    """The address is taken before the model is loaded. Raises UsageError."""
    sock = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, proto, _, address = found[0]
        sock = socket.socket(family, kind, proto)
        if sys.platform != "win32":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        if sock is not None:
            sock.close()
        advice = "Another program listens there; --port 0 takes a free one." if error.errno == errno.EADDRINUSE else ""
        raise UsageError(f"cannot serve at {host} port {port}: {error.strerror or error}. {advice}".rstrip()) from None
    return sock


def address_of(sock: socket.socket) -> str:
    """http://HOST:PORT, as a client on this machine writes it."""
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
