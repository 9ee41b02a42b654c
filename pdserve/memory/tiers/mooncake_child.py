"""The process of Mooncake Store's client: `python -m pdserve.memory.tiers.mooncake_child OPTIONS DESCRIPTORS PARENT`.

`OPTIONS`: `MooncakeOptions` as JSON. `DESCRIPTORS`: numbers of the socket and the memory of each lane. `PARENT`:
process id of the server, with which this process ends. `mooncake_store.py` says why there is such a process.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import signal
import socket
import sys
import threading
from typing import Any

from pdserve.base.process import die_with_parent
from pdserve.memory import shared
from pdserve.memory.tiers.mooncake_store import LaneAnswer, LaneCall, receive, send


def main(arguments: list[str]) -> None:
    """Set up the client, tell each lane the result, and serve the lanes until the server closes them."""
    options, numbers, parent = json.loads(arguments[0]), *arguments[1:]
    die_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptors = [int(number) for number in numbers.split(",")]
    lanes = [
        (socket.socket(fileno=file), shared.map_whole(memory, options["staging_bytes"]))
        for file, memory in zip(descriptors[::2], descriptors[1::2], strict=True)
    ]
    try:
        store = _set_up(options, [memory for _, memory in lanes])
    except (Exception, SystemExit) as error:
        for lane, _ in lanes:
            send(lane, LaneAnswer(error=str(error) or type(error).__name__))
        return
    threads = [threading.Thread(target=_serve, args=(store, *lane), daemon=True) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(0)  # the library's threads are in no state to end in order


def _set_up(options: dict[str, Any], memories: list[mmap.mmap]) -> Any:
    for name, value in {
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_LOG_LEVEL": "ERROR",
        **({"MC_FORCE_TCP": "1"} if options["protocol"] == "tcp" else {}),
    }.items():
        os.environ.setdefault(name, value)
    store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    status = store.setup(
        options["local_hostname"],
        options["metadata_server"],
        options["global_segment_size"],
        16 << 20,
        options["protocol"],
        options["device_name"],
        options["master_server_address"],
    )
    if status != 0:
        raise OSError(f"no master at {options['master_server_address']}, or its answer is an error (status {status})")
    for memory in memories:
        status = store.register_buffer(shared.address_of(memory), options["staging_bytes"])
        if status != 0:
            raise OSError(f"memory cannot be registered (status {status})")
    return store


def _serve(store: Any, lane: socket.socket, memory: mmap.mmap) -> None:
    send(lane, LaneAnswer())
    start = shared.address_of(memory)
    while True:
        try:
            call = receive(lane, LaneCall, None)
        except OSError:
            return
        try:
            answer = _run(store, call, start)
        except Exception as error:
            answer = LaneAnswer(error=f"Mooncake's client failed: {error}")
        send(lane, answer)


def _run(store: Any, call: LaneCall, start: int) -> LaneAnswer:
    places = [start + sum(call.sizes[:index]) for index in range(len(call.sizes))]
    match call.what:
        case "exists":
            found = store.batch_is_exist(call.keys)
            if any(status < 0 for status in found):
                return LaneAnswer(error=f"the master cannot be asked (status {min(found)})")
            return LaneAnswer([status == 1 for status in found])
        case "get":
            return _answer(store.batch_get_into(call.keys, places, call.sizes), call.sizes)
        case "put":
            return _answer(store.batch_put_from(call.keys, places, call.sizes), [0] * len(call.keys))
        case "discard":
            statuses = [store.remove(key, True) for key in call.keys]
            return _answer(statuses, statuses)
        case _:
            status = store.remove_all(True)
            return LaneAnswer(error=f"the master refused (status {status})" if status < 0 else "")


RPC_FAILED = -900
"""Mooncake's status when the master cannot be reached."""


def _answer(statuses: list[int], expected: list[int]) -> LaneAnswer:
    if RPC_FAILED in statuses:
        return LaneAnswer(error=f"the master cannot be reached (status {RPC_FAILED})")
    return LaneAnswer([status == good for status, good in zip(statuses, expected, strict=True)])


if __name__ == "__main__":
    main(sys.argv[1:])
