"""Memory that is released and resumed, weights by name, and weights that a trainer sends, over a scripted scheduler."""

from __future__ import annotations

import asyncio
import base64
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save

from pdserve.errors import ModelError
from pdserve.model.tensor_file import tensors_in
from pdserve.protocol.engine_memory import GetWeights, MemoryCommand, ReleaseMemory, ResumeMemory, WeightRows
from pdserve.protocol.messages import CommandReply
from pdserve.protocol.weights import (
    EndWeightsUpdate,
    JoinGroup,
    LeaveGroup,
    PrepareTensors,
    PrepareWeights,
    WeightsCommand,
)
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import Bench, bench

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]
BYTES = save({"a": torch.arange(6, dtype=torch.float32).view(2, 3), "b": torch.zeros(2, dtype=torch.bfloat16)})
GENERATE = {"text": "x"}


def commands(b: Bench, kind: type[Any]) -> list[Any]:
    return [command for command in b.scheduler.commands if isinstance(command, kind)]


async def test_requests_are_refused_while_memory_is_released(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        answer = await b.http.post("/release_memory_occupation")
        assert answer.json() == {"success": True, "released": ["kv_cache", "weights", "cuda_graph"]}
        assert commands(b, ReleaseMemory)[0].tags == ("kv_cache", "weights", "cuda_graph")
        health = await b.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "memory_released")
        for path, body in (("/generate", GENERATE), ("/v1/completions", {"prompt": "x"})):
            refused = await b.http.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "memory_released")
            assert refused.headers["Retry-After"] == "5"
        answer = await b.http.post("/resume_memory_occupation", json={"tags": ["weights"]})
        assert answer.json()["released"] == ["kv_cache", "cuda_graph"]
        assert (await b.http.post("/generate", json=GENERATE)).status_code == 503
        assert (await b.http.get("/resume_memory_occupation")).json()["released"] == []
        assert next(command.tags for command in commands(b, ResumeMemory)) == ("weights",)
        assert (await b.http.post("/generate", json=GENERATE)).status_code == 200
        assert (await b.http.get("/health")).json()["status"] == "ok"


async def test_a_release_that_fails_leaves_the_server_as_it_was(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.on_weights = lambda command: CommandReply(query_id=command.query_id, ok=False, message="disk full")
        answer = await b.http.post("/release_memory_occupation", json={"tags": ["weights"]})
        assert answer.status_code == 400 and "disk full" in answer.text
        assert (await b.http.post("/generate", json=GENERATE)).status_code == 200
        answer = await b.http.post("/release_memory_occupation", json={"tags": ["gpu"]})
        assert (answer.status_code, answer.json()["param"]) == (400, "tags")
        answer = await b.http.post("/resume_memory_occupation", json={"tags": []})
        assert answer.json() == {"success": True, "released": []}, "nothing was released"


async def test_weights_are_read_by_name(tokenizer: Tokenizer) -> None:
    values = np.array([[1.5, -2.0], [0.25, np.nan]], np.float32)

    def answer(command: WeightsCommand | MemoryCommand) -> CommandReply:
        assert isinstance(command, GetWeights)
        if command.name == "nothing":
            return CommandReply(query_id=command.query_id, ok=False, message="this model has no tensor nothing")
        payload = msgspec.msgpack.encode(WeightRows(values.shape, values.tobytes()))
        return CommandReply(query_id=command.query_id, ok=True, message="ok", payload=payload)

    async with bench(tokenizer) as b:
        b.scheduler.on_weights = answer
        found = await b.http.post("/get_weights_by_name", json={"name": "a", "truncate_size": 2})
        assert found.json() == [[1.5, -2.0], [0.25, None]]
        assert (await b.http.get("/get_weights_by_name?name=a&truncate_size=7")).status_code == 200
        assert [command.max_rows for command in commands(b, GetWeights)] == [2, 7]
        for body, status, field in (
            ({"name": "nothing"}, 404, "name"),
            ({"name": "a", "truncate_size": 0}, 400, "truncate_size"),
        ):
            refused = await b.http.post("/get_weights_by_name", json=body)
            assert (refused.status_code, refused.json()["param"]) == (status, field)
        unnamed = await b.http.get("/get_weights_by_name")
        assert (unnamed.status_code, unnamed.json()["param"]) == (400, "name") and "name: " in unnamed.text


@pytest.fixture
def shared_object() -> Iterator[Path]:
    path = Path("/dev/shm", f"pdserve-test-{uuid.uuid4().hex}")
    path.write_bytes(BYTES)
    yield path
    path.unlink()


async def test_tensors_arrive_in_the_body_or_in_shared_memory(tokenizer: Tokenizer, shared_object: Path) -> None:
    seen: list[list[str]] = []

    def answer(command: WeightsCommand | MemoryCommand) -> CommandReply:
        if isinstance(command, PrepareTensors):
            seen.append(sorted(name for path in command.files for name in tensors_in(path, "")))
        return CommandReply(query_id=command.query_id, ok=True, message="ok")

    async with bench(tokenizer) as b:
        b.scheduler.on_weights = answer
        for body in ({"tensors": base64.b64encode(BYTES).decode()}, {"shared_memory": [f"/{shared_object.name}"]}):
            done = await b.http.post("/update_weights_from_tensor", json=body)
            assert done.status_code == 200 and done.json()["success"], done.text
        assert seen == [["a", "b"], ["a", "b"]]
        with pytest.raises(ModelError):  # the files of a body end with the update
            tensors_in(commands(b, PrepareTensors)[0].files[0], "")
        for body, field in (
            ({"serialized_named_tensors": ["gASV"]}, "serialized_named_tensors"),
            ({"tensors": "not base64!"}, "tensors"),
            ({}, "tensors"),
            ({"tensors": "AA==", "shared_memory": "x"}, "tensors"),
            ({"shared_memory": "../etc/passwd"}, "shared_memory"),
            ({"shared_memory": "pdserve-no-such-object"}, "shared_memory"),
            ({"tensors": "AA==", "load_format": "flattened_bucket"}, "load_format"),
            ({"tensors": "AA==", "flush_cache": False}, "flush_cache"),
        ):
            refused = await b.http.post("/update_weights_from_tensor", json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field), refused.text
        assert len(seen) == 2


def told(command: WeightsCommand | MemoryCommand) -> CommandReply:
    """Fail as an engine whose rank cannot use the tensors."""
    message = "tensor a is [2], expected [3]"
    if isinstance(command, PrepareTensors) and command.files:
        try:
            tensors_in(command.files[0], command.names[0])
        except ModelError as error:
            message = str(error)
    elif isinstance(command, PrepareTensors) and command.group == "other":
        message = "group_name: this server is in no group 'other'"
    ok = not isinstance(command, PrepareTensors | PrepareWeights)
    return CommandReply(query_id=command.query_id, ok=ok, message=message)


async def test_weights_that_cannot_be_used_name_their_field(tokenizer: Tokenizer, shared_object: Path) -> None:
    """The message has no path of a file that the server wrote."""
    await asyncio.to_thread(shared_object.write_bytes, b"x")
    short = "is not a safetensors file, or is cut short: its header would not fit"
    sent = {"names": ["a"], "dtypes": ["float32"], "shapes": [[2]]}
    async with bench(tokenizer) as b:
        b.scheduler.on_weights = told
        for path, body, field, message in (
            ("tensor", {"tensors": base64.b64encode(b"junk").decode()}, "tensors", f"tensors: entry 0 {short}"),
            ("tensor", {"shared_memory": shared_object.name}, "shared_memory",
             f"shared_memory: {shared_object.name!r} {short}"),
            ("distributed", sent, "names", "names: tensor a is [2], expected [3]"),
            ("distributed", sent | {"group_name": "other"}, "group_name",
             "group_name: this server is in no group 'other'"),
            ("disk", {"model_path": "/there"}, "model_path", "model_path: tensor a is [2], expected [3]"),
        ):  # fmt: skip
            refused = await b.http.post(f"/update_weights_from_{path}", json=body)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"], error["message"]) == (400, field, message)
            assert refused.json()["message"] == message and refused.json()["success"] is False
        b.scheduler.on_weights = lambda command: CommandReply(
            query_id=command.query_id, ok=isinstance(command, EndWeightsUpdate), message="busy", is_final=True
        )
        for path in ("/update_weights_from_disk", "/destroy_weights_update_group"):
            busy = await b.http.post(path, json={"model_path": "/there"} if "disk" in path else {})
            assert (busy.status_code, busy.json()["error"]["code"]) == (409, "weights_busy")


def change_last_byte(path: Path) -> None:
    """As a mapping does: size and times stay."""
    times = path.stat()
    path.write_bytes(BYTES[:-1] + b"\1")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


async def test_an_object_in_shared_memory_is_loaded_once_while_it_stays(
    tokenizer: Tokenizer, shared_object: Path
) -> None:
    """As the router sends it: to prepare, and to install."""
    async with bench(tokenizer) as b:

        async def num_loads(**fields: Any) -> int:
            before = len(commands(b, PrepareTensors))
            body = {"shared_memory": shared_object.name, **fields}
            answer = await b.http.post("/update_weights_from_tensor", json=body)
            assert answer.status_code == 200, answer.text
            return len(commands(b, PrepareTensors)) - before

        assert [await num_loads(prepare_only=True), await num_loads(), await num_loads()] == [1, 0, 1]
        assert await num_loads(prepare_only=True) == 1
        change_last_byte(shared_object)
        assert await num_loads() == 1, "other bytes, also with the times and size of the former ones"


async def test_a_group_is_joined_used_and_left(tokenizer: Tokenizer) -> None:
    group = {"master_address": "localhost", "master_port": 29500, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    sent = {"names": ["a"], "dtypes": ["torch.bfloat16"], "shapes": [[2, 3]]}
    async with bench(tokenizer) as b:
        assert (await b.http.post("/init_weights_update_group", json=group)).json()["success"]
        assert (await b.http.post("/update_weights_from_distributed", json=sent)).json()["success"]
        assert (await b.http.post("/destroy_weights_update_group", json={})).json()["success"]
        (join,), (prepare,), (leave,) = (commands(b, kind) for kind in (JoinGroup, PrepareTensors, LeaveGroup))
        assert (join.name, join.host, join.port, join.rank_offset) == ("weight_update_group", "localhost", 29500, 1)
        assert (prepare.group, prepare.sent[0].dtype, prepare.sent[0].shape) == (join.name, "bfloat16", (2, 3))
        assert leave.name == join.name
        for path, body, field in (
            ("/init_weights_update_group", group | {"master_port": 0}, "master_port"),
            ("/init_weights_update_group", group | {"rank_offset": 0}, "rank_offset"),
            ("/init_weights_update_group", group | {"world_size": 1}, "world_size"),
            ("/init_weights_update_group", group | {"backend": "mpi"}, "backend"),
            ("/init_weights_update_group", group | {"master_address": "a b"}, "master_address"),
            ("/update_weights_from_distributed", sent | {"names": []}, "names"),
            ("/update_weights_from_distributed", sent | {"dtypes": ["int8"]}, "dtypes"),
            ("/update_weights_from_distributed", sent | {"shapes": []}, "shapes"),
            ("/update_weights_from_distributed", sent | {"group_name": ""}, "group_name"),
        ):
            refused = await b.http.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field), refused.text
