"""What two processes of a server write each other arrives as it was sent, in order, gathered."""

from __future__ import annotations

import multiprocessing
from dataclasses import asdict

from minicpm_cli.errors import ContextOverflow
from minicpm_cli.server.apart import _portable
from minicpm_cli.server.faults import fault_of
from minicpm_cli.server.post import Begun, Cancel, Ended, Post, packed, received, unpacked
from minicpm_cli.types import Event, Logprob, Timings, ToolCallDelta, Usage

EVENTS = (
    Event("a", "déjà 你好 \ud800"),
    Event("b", "hm", "think"),
    Event("a", logprobs=(Logprob(3, -0.5, ((3, -0.5),)),), text="x"),
    Event("b", tool_call=ToolCallDelta(0, "{", "call_1", "weather")),
    Event("a", finish="stop", usage=Usage(3, 4, 1), timings=Timings(0.1, 0.2, 0.3), seed=5, incomplete=True),
)


def test_every_kind_of_event_comes_out_as_it_went_in() -> None:
    items = [Begun("a"), *EVENTS, Cancel("b"), Ended(dead=True)]
    assert list(unpacked(packed(items))) == items


def test_an_error_is_what_a_client_is_told_of_it() -> None:
    error = ContextOverflow(5, 6, 7)
    (event,) = unpacked(packed([Event("a", finish="error", error=_portable(error))]))
    assert asdict(fault_of(event.error)) == asdict(fault_of(error))


def test_what_is_put_while_nobody_reads_comes_in_order_and_in_few_pieces() -> None:
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        post = Post(ours)
        for number in range(10_000):
            post.put(Event(str(number), "text"))
        found, messages = list[str](), 0
        while len(found) < 10_000:
            found += [event.id for event in received(theirs)]
            messages += 1
        post.close()
    assert found == [str(number) for number in range(10_000)]
    assert messages < 1000


def test_it_ends_quietly_when_the_other_side_is_gone() -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    with ours:
        post = Post(ours)
        post.put(EVENTS[0])
        post.close()
