"""Workers on Ray: an actor with an engine each, on whatever nodes the cluster has, or gets while the work goes on.

What Ray does well is left to it: finding a place, starting a process there, noticing that it is gone.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Pipe
from queue import SimpleQueue
from typing import Any

from minicpm_cli.errors import DeviceError, UsageError
from minicpm_cli.fleet.link import pickled, shut
from minicpm_cli.fleet.messages import FromWorker, Order, ToWorker
from minicpm_cli.fleet.worker import work
from minicpm_cli.settings import variables

LOCAL = "local"
_SECONDS = 1.0  # that an actor listens before it says that there is nothing


class Hosted:
    """The actor: a worker in a thread, and the connection to it."""

    def __init__(self, order: Order) -> None:
        self._ours, theirs = Pipe()
        self._ours.send(order)
        threading.Thread(target=self._work, args=(order, theirs), daemon=True).start()

    def _work(self, order: Order, theirs: Any) -> None:
        work(theirs)
        shut(theirs, socket.SHUT_RDWR)  # a thread of it still reads from there, and would keep a closed one open

    def tell(self, message: ToWorker) -> None:
        self._ours.send(message)

    def hear(self) -> list[FromWorker] | None:
        """What has come, after a wait; None at the end."""
        found: list[FromWorker] = []
        try:
            while self._ours.poll(0 if found else _SECONDS):
                found.append(self._ours.recv())
        except (EOFError, OSError):
            return found or None
        return found


class RayLink:
    """See `minicpm_cli.fleet.link.Link`."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor
        self._out: SimpleQueue[ToWorker | None] = SimpleQueue()
        self._closed = False

    def begin(self, told: Callable[[FromWorker | None], None]) -> None:
        for work_of in (self._send, self._hear):
            threading.Thread(target=work_of, args=(told,), name="fleet-ray", daemon=True).start()

    def send(self, message: ToWorker) -> None:
        self._out.put(message)

    def close(self) -> None:
        self._closed = True
        self._out.put(None)
        self.kill()

    def join(self) -> None:
        pass

    def kill(self) -> None:
        with suppress(Exception):  # it may be gone, or its cluster
            self._ray.kill(self._actor)

    def _send(self, told: Callable[[FromWorker | None], None]) -> None:
        with suppress(Exception):  # whoever hears tells that the actor is gone
            while (message := self._out.get()) is not None:
                if pickled(message, told) is not None:
                    self._ray.get(self._actor.tell.remote(message))

    def _hear(self, told: Callable[[FromWorker | None], None]) -> None:
        with suppress(Exception):  # Ray's many errors of a dead actor mean the same here
            while not self._closed and (messages := self._ray.get(self._actor.hear.remote())) is not None:
                for message in messages:
                    told(message)
        told(None)


def connect(address: str, workers: int, cpus: int) -> Any:
    """Ray, connected to the cluster at `address` ("auto": the one of this machine), or one of its own. Raises
    UsageError where Ray is not installed, DeviceError where nothing answers.
    """
    try:
        import ray
    except ImportError:
        raise UsageError("--ray needs Ray: pip install 'minicpm-cli[ray]'.") from None
    variables().setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report to its makers
    own = {"num_cpus": workers * cpus, "include_dashboard": False}
    where = own if address == LOCAL else {"address": address}
    try:
        ray.init(**where, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise DeviceError(
            f"no Ray cluster at {address}: {error}. Start one with `ray start`, or give local."
        ) from error
    return ray


def starter(ray: Any, order: Order, cpus: int) -> Callable[[int], RayLink]:
    """Makes the actor of a worker: `cpus` cores, or a GPU where the order's device is no CPU. One that finds no place
    now waits for a node.
    """
    needs = {"num_cpus": cpus, "num_gpus": 0} if order.options.device == "cpu" else {"num_cpus": 1, "num_gpus": 1}

    members = {
        "tell": ray.method(concurrency_group="tell")(Hosted.tell),
        "hear": ray.method(concurrency_group="hear")(Hosted.hear),
    }
    remote = ray.remote(concurrency_groups={"tell": 1, "hear": 1}, **needs)(type("Worker", (Hosted,), members))

    def start(_: int) -> RayLink:
        if not any(node["Alive"] for node in ray.nodes()):
            raise DeviceError("the Ray cluster has no node any more.")
        return RayLink(ray, remote.remote(order))

    return start
