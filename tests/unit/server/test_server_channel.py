"""The API <-> scheduler channel: both implementations carry the same messages, in order, both ways."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from pdserve.errors import EngineDeadError, ProtocolError
from pdserve.protocol.channel import (
    ApiChannel,
    SchedulerChannel,
    ZmqApiChannel,
    ZmqSchedulerChannel,
    create_channel_address,
    memory_channel_pair,
    remove_channel_address,
)
from pdserve.protocol.messages import AbortRequest, EngineCoreOutput, GenerateRequest, OutputBatch, RoomAddress
from pdserve.protocol.sampling import CoreSamplingParams
from tests.waiting import settle, until


async def _round_trip(api: ApiChannel, scheduler: SchedulerChannel) -> None:
    request = GenerateRequest(
        rid="a",
        input_ids=[1, 2, 3],
        sampling=CoreSamplingParams(stop=("x",), logit_bias={3: 1.5}),
        room=RoomAddress(host="h", port=None, room=(1 << 63) - 1),
    )
    await api.send(request)
    await api.send(AbortRequest(rid=None))
    assert await asyncio.to_thread(scheduler.recv, 5.0) == request
    assert await asyncio.to_thread(scheduler.recv, 5.0) == AbortRequest(rid=None)
    assert scheduler.recv(0.0) is None
    batches = [OutputBatch(outputs=[EngineCoreOutput(rid="a", token_ids=[i])]) for i in range(100)]
    for batch in batches:
        scheduler.send(batch)
    assert [await asyncio.wait_for(api.recv(), 5.0) for _ in batches] == batches


def test_memory_channel_carries_messages_in_order() -> None:
    api, scheduler = memory_channel_pair()
    asyncio.run(_round_trip(api, scheduler))


def test_closed_memory_channel_reports_a_dead_engine() -> None:
    async def run() -> None:
        api, _ = memory_channel_pair()
        pending = asyncio.create_task(api.recv())
        await asyncio.sleep(0)
        api.close()
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(pending, 5.0)

    asyncio.run(run())


@contextlib.contextmanager
def zmq_pair() -> Iterator[tuple[ZmqApiChannel, ZmqSchedulerChannel]]:
    """Both ends over sockets; used inside an event loop."""
    address = create_channel_address()
    try:
        with contextlib.closing(ZmqApiChannel(address)) as api, contextlib.closing(ZmqSchedulerChannel(address)) as far:
            yield api, far
    finally:
        remove_channel_address(address)


def test_zmq_channel_carries_messages_in_order_in_a_private_directory() -> None:
    address = create_channel_address()

    async def run() -> None:
        with contextlib.closing(ZmqApiChannel(address)) as api, contextlib.closing(ZmqSchedulerChannel(address)) as far:
            assert stat.S_IMODE(os.stat(address.directory).st_mode) == 0o700
            await _round_trip(api, far)

    asyncio.run(run())
    remove_channel_address(address)
    assert not os.path.exists(address.directory)


async def give_up(api: ZmqApiChannel) -> None:
    """Wait for a message, and then no longer."""
    waiting = asyncio.create_task(api.recv())
    await asyncio.sleep(0)
    waiting.cancel()


async def test_zmq_channel_wakes_for_each_message_that_comes_while_it_waits_or_does_not() -> None:
    with zmq_pair() as (api, scheduler):
        for i in range(50):
            batch = OutputBatch(outputs=[EngineCoreOutput(rid="a", token_ids=[i])])
            pending = asyncio.create_task(api.recv()) if i % 2 == 0 else None
            await asyncio.sleep(0)
            await asyncio.to_thread(scheduler.send, batch)
            if i % 5 == 0:
                await settle()  # the socket is readable while no task receives
            assert await asyncio.wait_for(pending or api.recv(), 5.0) == batch
        await give_up(api)
        scheduler.send(OutputBatch(outputs=[]))
        assert await asyncio.wait_for(api.recv(), 5.0) == OutputBatch(outputs=[])


async def test_a_message_that_nobody_takes_does_not_have_the_loop_turn_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop looks away from the socket."""
    loop = asyncio.get_running_loop()
    remove, removed = loop.remove_reader, list[object]()

    def removing(file: Any) -> bool:
        removed.append(file)
        return remove(file)

    with zmq_pair() as (api, scheduler):
        await give_up(api)
        monkeypatch.setattr(loop, "remove_reader", removing)
        scheduler.send(OutputBatch(outputs=[]))
        await until(lambda: removed)
        assert await asyncio.wait_for(api.recv(), 5.0) == OutputBatch(outputs=[])


async def test_closing_a_zmq_channel_wakes_who_waits() -> None:
    with zmq_pair() as (api, _):
        pending = asyncio.create_task(api.recv())
        await asyncio.sleep(0)
        api.close()
        for waiting in (pending, api.recv(), api.send(AbortRequest(rid=None))):
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(waiting, 5.0)


def test_junk_on_the_socket_is_a_protocol_error_and_the_channel_lives_on() -> None:
    address = create_channel_address()
    scheduler = ZmqSchedulerChannel(address)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.connect(address.to_scheduler)
    try:
        push.send(b"\x01 no message")
        with pytest.raises(ProtocolError):
            scheduler.recv(5.0)
        assert scheduler.recv(0.0) is None
    finally:
        push.close(linger=0)
        context.term()
        scheduler.close()
        remove_channel_address(address)
