"""`/update_weights_from_tensor`, `/update_weights_from_distributed` and their groups: a trainer sends tensors.

    from_tensor        safetensors bytes in the body (base64), or in shared memory ──> files that all ranks read
    from_distributed   init_weights_update_group ──> the trainer broadcasts to all ranks ──> destroy_...

Names and shapes are checked beside the weights in use, and tensors that are not sent stay. Fields are SGLang's, except
where a pickled object would travel: `serialized_named_tensors` is refused. `weights.py` runs the update.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from fastapi import Request
from fastapi.responses import Response

from pdserve.errors import RequestError
from pdserve.http.errors import error_object
from pdserve.protocol.weights import JoinGroup, LeaveGroup, PrepareTensors, SentTensor
from pdserve.server.context import ServerContext
from pdserve.server.http.json_http import convert, json_response, read_json_object
from pdserve.server.request.weights_bodies import (
    LeaveGroupBody,
    WeightsFromDistributedBody,
    WeightsFromTensorBody,
    WeightsGroupBody,
)
from pdserve.server.sglang_api.weights import REPLY_S, Preparation, check_begun, named_field, run_update, take_prepared

SHARED_MEMORY = Path("/dev/shm")
_OBJECT_NAME = re.compile(r"/?[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")
_GROUP_NAME = re.compile(r"[A-Za-z0-9_.:\-]{1,100}")
_MOST_FILES = 1024
_MOST_TENSORS = 1 << 20
_MOST_RANKS = 1 << 16
_MAX_TIMEOUT_S = 3600.0
_GROUP_FIELDS = ("group_name", "backend", "master_address")
_DTYPES = ("bfloat16", "float16", "float32")
_SLACK_BYTES = 1 << 30
"""Bytes of an object beside twice those of the weights in use."""


async def update_weights_from_tensor(context: ServerContext, request: Request) -> Response:
    """Replace tensors by those in the body, or in shared memory; 400 when they do not fit, and nothing changes."""
    raw = await read_json_object(request, context.max_body_bytes)
    if "serialized_named_tensors" in raw:
        raise RequestError(
            "serialized_named_tensors is a pickled object, which is never read; send safetensors bytes in `tensors` "
            "(base64), or name shared-memory objects in `shared_memory`",
            field="serialized_named_tensors",
        )
    body = convert(raw, WeightsFromTensorBody)
    _check_load_format(context, body.load_format)
    texts, names = _listed(body.tensors, "tensors"), _listed(body.shared_memory, "shared_memory")
    if bool(texts) is bool(names):
        raise RequestError("give either tensors or shared_memory", field="tensors")
    if context.config.parallel.nnodes > 1:
        field = "tensors" if texts else "shared_memory"
        raise RequestError(
            f"{field}: with --nnodes above 1 not all ranks can read them; use /update_weights_from_distributed",
            field=field,
        )
    with contextlib.ExitStack() as stack:
        if texts:
            files = await asyncio.to_thread(_write_files, stack, texts)
            given = tuple(f"entry {number}" for number in range(len(texts)))
        else:
            most_bytes = _most_bytes(context)
            files = [_object_path(name, most_bytes) for name in names]
            given = tuple(map(repr, names))
        may_be_prepared = body.prepare_only or context.changing_weights.prepared is not None
        if texts:
            key: object = await asyncio.to_thread(_key, texts)
        elif may_be_prepared:
            key = tuple(await asyncio.gather(*(asyncio.to_thread(_digest_of_object, path) for path in files)))
        else:
            key = object()  # equal to no other: the objects are not read twice
        return await run_update(
            context,
            Preparation(
                key,
                lambda i: PrepareTensors(query_id=i, files=tuple(files), names=given),
                "tensors" if texts else "shared_memory",
            ),
            body,
            prepare_only=body.prepare_only,
        )


async def update_weights_from_distributed(context: ServerContext, request: Request) -> Response:
    """Replace tensors by those that the trainer of a group broadcasts."""
    body = convert(await read_json_object(request, context.max_body_bytes), WeightsFromDistributedBody)
    _check_load_format(context, body.load_format)
    sent = _sent(body)
    group = _group_name(body.group_name)
    return await run_update(
        context,
        Preparation(
            object(), lambda i: PrepareTensors(query_id=i, group=group, sent=sent), "names", fields=("group_name",)
        ),
        body,
    )


async def init_weights_update_group(context: ServerContext, request: Request) -> Response:
    """Join a group of torch.distributed, whose rank 0 is the trainer; answers when all its members have met."""
    body = convert(await read_json_object(request, context.max_body_bytes), WeightsGroupBody)
    ranks = context.config.parallel.shape.num_ranks * context.config.parallel.dp_size
    host = body.master_address
    if not re.fullmatch(r"[A-Za-z0-9_.:\-\[\]]{1,255}", host):
        raise RequestError("master_address must be a host name or an address", field="master_address")
    for field, value, low, high in (
        ("master_port", body.master_port, 1, 65535),
        ("rank_offset", body.rank_offset, 1, _MOST_RANKS),
        ("world_size", body.world_size, body.rank_offset + ranks, _MOST_RANKS),
        ("timeout_secs", body.timeout_secs, 1, _MAX_TIMEOUT_S),
    ):
        if not low <= value <= high:
            raise RequestError(f"{field} must be {low} to {high:g}, got {value}", field=field)
    if body.backend not in ("gloo", "nccl"):
        raise RequestError(f"backend must be gloo or nccl, got {body.backend!r}", field="backend")
    backend: Literal["gloo", "nccl"] = "gloo" if body.backend == "gloo" else "nccl"
    name = _group_name(body.group_name)
    return await _group_command(
        context,
        lambda i: JoinGroup(
            query_id=i, name=name, host=host, port=body.master_port, rank_offset=body.rank_offset,
            world_size=body.world_size, backend=backend, timeout_s=body.timeout_secs,
        ),
        body.timeout_secs * 2 + REPLY_S,
        "Succeeded to initialize custom process group.",
    )  # fmt: skip


async def destroy_weights_update_group(context: ServerContext, request: Request) -> Response:
    """Leave a group."""
    body = convert(await read_json_object(request, context.max_body_bytes), LeaveGroupBody)
    name = _group_name(body.group_name)
    done = "Succeeded to destroy custom process group."
    return await _group_command(context, lambda i: LeaveGroup(query_id=i, name=name), REPLY_S, done)


async def _group_command(context: ServerContext, make: Any, timeout_s: float, done: str) -> Response:
    context.client.require_ready()
    change = context.changing_weights
    if change.lock.locked():
        raise RequestError("an update of the weights is running", status=409, code="weights_busy")
    async with change.lock:
        take_prepared(change)  # the engine drops it
        reply = await context.client.command(make, timeout_s)
    check_begun(reply)
    if not reply.ok:
        field = named_field(reply.message, _GROUP_FIELDS)
        error = error_object(reply.message, 400, param=field, code="weights_group")
        return json_response({**error, "success": False, "message": reply.message}, status=400)
    return json_response({"success": True, "message": done})


def _check_load_format(context: ServerContext, load_format: str | None) -> None:
    context.client.require_ready()
    if load_format not in (None, "auto"):
        raise RequestError(f"load_format {load_format!r} is not supported; leave it out", field="load_format")


def _listed(given: str | list[str] | None, field: str) -> list[str]:
    listed = [] if given is None else [given] if isinstance(given, str) else given
    if len(listed) > _MOST_FILES:
        raise RequestError(f"{field} has {len(listed)} entries; the maximum is {_MOST_FILES}", field=field)
    return listed


def _key(texts: Sequence[str]) -> object:
    """Return what is equal for equal tensors of two bodies."""
    digest = hashlib.blake2b(digest_size=32)
    for text in texts:
        digest.update(hashlib.blake2b(text.encode(), digest_size=32).digest())
    return digest.digest()


def _digest_of_object(path: str) -> bytes:
    """Return a digest of the bytes in a shared-memory object: its times do not show what a mapping writes. Any thread.

    Raises:
        RequestError: the object cannot be read.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            return hashlib.file_digest(file, "blake2b").digest()
    except OSError as error:
        raise RequestError(f"shared_memory: {path} cannot be read: {error.strerror}", field="shared_memory") from error


def _write_files(stack: contextlib.ExitStack, texts: Sequence[str]) -> list[str]:
    """Write safetensors bytes into files that only this user can read, until `stack` ends. Any thread."""
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-tensors-"))
    files = []
    for number, text in enumerate(texts):
        path = Path(directory, f"{number}.safetensors")
        try:
            path.write_bytes(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError) as error:
            raise RequestError(f"tensors: entry {number} is not base64: {error}", field="tensors") from error
        except OSError as error:
            raise RequestError(f"tensors: cannot be written: {error}", field="tensors", status=503) from error
        files.append(str(path))
    return files


def _object_path(name: str, most_bytes: int) -> str:
    """Return the path of a shared-memory object of this user, of at most `most_bytes`."""
    if not _OBJECT_NAME.fullmatch(name) or ".." in name:
        raise RequestError(
            f"shared_memory: {name!r} is no name of a shared-memory object: letters, digits, '_', '.', '-'",
            field="shared_memory",
        )
    path = SHARED_MEMORY / name.removeprefix("/")
    try:
        facts = os.lstat(path)
    except OSError as error:
        raise RequestError(
            f"shared_memory: there is no object {name!r}: {error.strerror}", field="shared_memory"
        ) from error
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
        raise RequestError(f"shared_memory: {name!r} is not an object of this server's user", field="shared_memory")
    if facts.st_size > most_bytes:
        raise RequestError(
            f"shared_memory: {name!r} has {facts.st_size} bytes, more than weights of this model take ({most_bytes})",
            field="shared_memory",
        )
    return str(path)


def _most_bytes(context: ServerContext) -> int:
    """Return the most bytes that an object with all weights may have: float32 of weights in 16 bits, and some more."""
    own = context.client.require_ready().facts.get("weight_bytes")
    ranks = context.config.parallel.shape.num_ranks * context.config.parallel.num_sharing
    return _SLACK_BYTES + (2 * int(own) * ranks if isinstance(own, int | float) else 0)


def _group_name(name: str) -> str:
    if not _GROUP_NAME.fullmatch(name):
        raise RequestError("group_name must be 1 to 100 letters, digits, '_', '.', ':' or '-'", field="group_name")
    return name


def _sent(body: WeightsFromDistributedBody) -> tuple[SentTensor, ...]:
    """Return the tensors that a body announces. Raises RequestError naming the field."""
    count = len(body.names)
    if not 1 <= count <= _MOST_TENSORS:
        raise RequestError(f"names must have 1 to {_MOST_TENSORS} entries", field="names")
    if len(set(body.names)) < count:
        raise RequestError("names has a name twice", field="names")
    for field, listed in (("dtypes", body.dtypes), ("shapes", body.shapes)):
        if len(listed) != count:
            raise RequestError(f"{field} has {len(listed)} entries, and names {count}", field=field)
    kinds = [kind.removeprefix("torch.") for kind in body.dtypes]
    unknown = next((kind for kind in kinds if kind not in _DTYPES), None)
    if unknown is not None:
        raise RequestError(f"dtypes: {unknown!r} is not one of {', '.join(_DTYPES)}", field="dtypes")
    if any(size < 0 or size > 1 << 40 for shape in body.shapes for size in shape):
        raise RequestError("shapes must have sizes from 0 on", field="shapes")
    return tuple(_tensors(body.names, kinds, body.shapes))


def _tensors(names: Sequence[str], kinds: Sequence[str], shapes: Sequence[Sequence[int]]) -> Iterator[SentTensor]:
    for name, kind, shape in zip(names, kinds, shapes, strict=True):
        yield SentTensor(name, cast(Literal["bfloat16", "float16", "float32"], kind), tuple(shape))
