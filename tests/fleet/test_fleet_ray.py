"""The same over Ray: a local cluster with two CPU workers, one of which is killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
from fleet_cases import COUNT, asked, order_of, texts

from minicpm_cli.errors import DeviceError
from minicpm_cli.fleet import ray_link
from minicpm_cli.fleet.fleet import Fleet
from minicpm_cli.llm.llm import LLM
from minicpm_cli.llm.prompter import Prompter

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    connected = ray_link.connect(ray_link.LOCAL, 2, 1)
    yield connected
    connected.shutdown()


@pytest.mark.parametrize("count", [2, 1])
def test_an_actor_that_is_killed_costs_nothing_but_time(ray: Any, tmp_path: Path, count: int) -> None:
    """Another takes its place, or is in time for what the only one has left."""
    order = order_of(tmp_path)
    with closing(LLM.open(order.options, order.files, threads=1)) as llm:
        alone = texts(llm.stream(asked()))
    start, said = ray_link.starter(ray, order, 1), list[str]()
    links = [start(number) for number in range(count)]
    with closing(Fleet(Prompter.open(order.options, order.files), links, said.append, start)) as fleet:
        together: dict[str, str] = {}
        for number, event in enumerate(fleet.stream([fleet.encoded(request) for request in asked()])):
            if number == 4:
                links[0].kill()
            assert event.error is None, event.error
            together[event.id] = together.get(event.id, "") + event.text
    assert together == alone
    assert len(together) == COUNT
    assert len(said) == 1


def test_no_cluster_is_an_error_that_says_so() -> None:
    with pytest.raises(DeviceError, match=r"no Ray cluster at 127\.0\.0\.1:1"):
        ray_link.connect("127.0.0.1:1", 1, 1)
