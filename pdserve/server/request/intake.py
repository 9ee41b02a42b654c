"""Converts a parsed body to its sequences (`RequestState`): prompts, bootstrap rooms, request ids, resumed streams.

Pure; the endpoints call it before anything is submitted.

A body makes `num_prompts * n` sequences; sequence `p * n + j` is the j-th output of prompt p.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from pdserve.base.hosts import HostPatterns, canonical_host, is_host
from pdserve.base.log import current_request_id
from pdserve.base.stream_state import RESUME_FIELD
from pdserve.config.groups import DisaggMode
from pdserve.errors import RequestError
from pdserve.protocol.cached_tokens import joined_salt
from pdserve.protocol.failure import weights_mismatch
from pdserve.protocol.hidden_states import salt_of_embeds
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.messages import FAKE_BOOTSTRAP_HOST, MAX_ROOM, GenerateRequest, RoomAddress
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.server.engine_client.live_requests import RequestState
from pdserve.server.generation import Resume
from pdserve.server.http.json_http import scalar_or_list

MAX_PROMPTS = 4096
MAX_SEQUENCES = 8192
"""Maximum sequences of one body: prompts times `n`."""
MAX_PATTERN_SEQUENCES = 256
"""Maximum of stop patterns times sequences of one body. Each may take `stop_regex.SLOW_S` of the event loop."""
MAX_SENT_CHARS = 1 << 26
"""Maximum characters of grammars of one body; each grammar counts once for every sequence that carries it."""
MAX_RID_CHARS = 256
MAX_SALT_CHARS = 1024
MAX_TOP_LOGPROBS = 20
"""OpenAI's limit."""
MAX_NATIVE_TOP_LOGPROBS = 128
"""Maximum `top_logprobs_num` of `/generate`."""


class TransferAddress(Protocol):
    """A body with `bootstrap_host`, `bootstrap_port`, `bootstrap_room` and `rid`: each a scalar, a list, or None.

    `priority` applies to all sequences of the body.
    """

    rid: Any
    priority: int | None
    data_parallel_rank: int | None
    bootstrap_host: Any
    bootstrap_port: Any
    bootstrap_room: Any


def as_prompts(value: Any, field: str, *, allow_text: bool, allow_ids: bool) -> tuple[list[str | list[int]], bool]:
    """Return the prompts in `value`, and whether they came as a batch.

    `value` is text, token ids, or a list of either; all prompts of a list have the same kind.

    Raises:
        RequestError: 400 naming `field`, or the prompt of a batch that is empty or of another kind than the first.
    """
    kinds: list[type] = [kind for kind, allowed in ((str, allow_text), (list, allow_ids)) if allowed]
    wanted = " or ".join(_KINDS[kind] for kind in kinds)
    if isinstance(value, list) and not value:
        raise RequestError(f"{field} must not be empty", field=field)
    if isinstance(value, list) and not (allow_ids and _is_id(value[0])):
        prompts, batch = value, True
    else:
        prompts, batch = [value], False
        wanted += ", or a list of these"
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"{field} has {len(prompts)} prompts; the maximum is {MAX_PROMPTS}", field=field)
    for i, prompt in enumerate(prompts):
        where = prompt_field(field, i, batch=batch)
        if type(prompt) not in kinds:
            raise RequestError(f"{where} must be {wanted}, got {_kind(prompt)}", field=where)
        if type(prompt) is not type(prompts[0]):
            message = f"{where} is {_kind(prompt)} and {field}[0] is {_kind(prompts[0])}: a batch must have one kind"
            raise RequestError(message, field=where)
        if not prompt:
            raise RequestError(f"{where} must not be empty", field=where)
    return prompts, batch


_KINDS: dict[type, str] = {str: "a string", list: "a list of token ids"}


def _is_id(value: Any) -> bool:
    """Whether a list that begins with `value` is one prompt. Other numbers count as ids here and are refused later."""
    return isinstance(value, int | float)


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def prompt_field(field: str, index: int, *, batch: bool) -> str:
    """Return the name of prompt `index` of `field` in errors."""
    return f"{field}[{index}]" if batch else field


def check_token_ids(token_ids: Sequence[Any], vocab_size: int, field: str) -> None:
    """Check that all token ids are integers in `[0, vocab_size)`.

    Raises:
        RequestError: 400 naming `field`.
    """
    for i, token_id in enumerate(token_ids):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            message = f"{field} must hold token ids in [0, {vocab_size}), got {token_id!r} at position {i}"
            raise RequestError(message, field=field)


def check_top_logprobs(value: int | None, field: str, most: int = MAX_TOP_LOGPROBS) -> int | None:
    """Check that `value` is in `[0, most]` or None.

    Raises:
        RequestError: 400 naming `field`.
    """
    if value is not None and not 0 <= value <= most:
        raise RequestError(f"{field} must be in [0, {most}], got {value}", field=field)
    return value


def openai_logprobs(top: int | None, prompt_top: int | None = None) -> Logprobs | None:
    """Return the logprobs that an OpenAI request wants of its output and of its prompt; None: none.

    The client reads both from the decode server, so prefill sends the prompt's logprobs to decode.
    """
    if top is None and prompt_top is None:
        return None
    return Logprobs(
        output=top is not None,
        top=max(top or 0, prompt_top or 0),
        prompt_from=None if prompt_top is None else 0,
        to_decode=True,
    )


def _expand_rooms(room: Any, num_prompts: int, n: int) -> list[int]:
    """Return one bootstrap room per sequence.

    A scalar is the first room of consecutive ones. A list has one room per sequence, or one per prompt; the latter is
    the first of n consecutive rooms.
    """
    field = "bootstrap_room"
    rooms = room if isinstance(room, list) else None
    for value in [room] if rooms is None else rooms[: num_prompts * n]:
        if type(value) is not int or not 0 <= value <= MAX_ROOM:
            raise RequestError(f"{field} must be an integer in [0, {MAX_ROOM}], got {value!r}", field=field)
    if rooms is None:
        expanded = [room + i for i in range(num_prompts * n)]
    elif len(rooms) == num_prompts * n:
        expanded = rooms
    elif len(rooms) == num_prompts:
        expanded = [base + j for base in rooms for j in range(n)]
    else:
        raise RequestError(f"{field} has {len(rooms)} entries for {num_prompts} prompts with n={n}", field=field)
    if max(expanded) > MAX_ROOM or len(set(expanded)) != len(expanded):
        raise RequestError(f"{field} must give every sequence its own room up to {MAX_ROOM}", field=field)
    return expanded


def _spread(value: Any, field: str, num_prompts: int, n: int, kind: type) -> list[Any]:
    if isinstance(value, list) and len(value) == num_prompts * n:
        return scalar_or_list(value, num_prompts * n, field, kind)
    return [entry for entry in scalar_or_list(value, num_prompts, field, kind) for _ in range(n)]


def rooms_of(
    body: TransferAddress,
    mode: DisaggMode,
    num_prompts: int,
    n: int,
    allowed: HostPatterns | None = None,
    *,
    default_port: int | None = None,
    fake_rooms: bool = False,
) -> list[RoomAddress] | list[None]:
    """Return the room address of each sequence; all None on a unified server.

    `body` has `bootstrap_host`, `bootstrap_port`, `bootstrap_room`: scalars or lists. `allowed`: the only prefill
    addresses that a request to a decode server may name; None: any. `default_port`: on a decode server, the port of a
    sequence without a `bootstrap_port`. `fake_rooms`: clients may name `FAKE_BOOTSTRAP_HOST`, because this server moves
    no KV cache.

    Raises:
        RequestError: 400 naming the field that is missing or wrong.
    """
    if mode == "null":
        return [None] * (num_prompts * n)
    if body.bootstrap_room is None:
        raise RequestError(
            f"bootstrap_room is missing: this is a {mode} server, send requests through the router, or to a decode "
            "server that is started with --disaggregation-prefill",
            field="bootstrap_room",
        )
    rooms = _expand_rooms(body.bootstrap_room, num_prompts, n)
    hosts = _spread(body.bootstrap_host, "bootstrap_host", num_prompts, n, str)
    hosts = [host and canonical_host(host) for host in hosts]
    ports = _spread(body.bootstrap_port, "bootstrap_port", num_prompts, n, int)
    if mode == "decode" and any(not host for host in hosts):
        message = "bootstrap_host is missing: a decode server needs the address of the prefill server"
        raise RequestError(message, field="bootstrap_host")
    if FAKE_BOOTSTRAP_HOST in hosts and not fake_rooms:
        message = f"bootstrap_host {FAKE_BOOTSTRAP_HOST} needs --disaggregation-transfer-backend fake on this server"
        raise RequestError(message, field="bootstrap_host")
    for port in ports:
        if port is not None and not 1 <= port <= 65535:
            raise RequestError(f"bootstrap_port must be in [1, 65535], got {port}", field="bootstrap_port")
    if mode == "decode":
        ports = [default_port if port is None else port for port in ports]
        _check_prefill_addresses(set(zip(hosts, ports, strict=True)), allowed)
    trio = zip(hosts, ports, rooms, strict=True)
    return [RoomAddress(host=host or "", port=port, room=room) for host, port, room in trio]


def _check_prefill_addresses(addresses: Iterable[tuple[str, int | None]], allowed: HostPatterns | None) -> None:
    """Check that each address has a valid host that `allowed` permits.

    Raises:
        RequestError: 400 naming `bootstrap_host`.
    """
    for host, port in addresses:
        if not is_host(host):
            raise RequestError(f"bootstrap_host is not a valid host: {host[:100]!r}", field="bootstrap_host")
        if allowed is not None and not allowed.allow(host, port or 0):
            message = f"bootstrap_host {host}:{port} is not listed by --disaggregation-allowed-prefill of this server"
            raise RequestError(message, field="bootstrap_host")


def _names(rid: Any, num_prompts: int) -> list[str]:
    """Return one request id per prompt: the client's, or a new one."""
    names = scalar_or_list(rid, num_prompts, "rid", str)
    if isinstance(rid, str) and num_prompts > 1:
        names = [f"{rid}_{i}" for i in range(num_prompts)]
    if any(name is not None and not 1 <= len(name) <= MAX_RID_CHARS for name in names):
        raise RequestError(f"rid must have 1 to {MAX_RID_CHARS} characters", field="rid")
    given = [name for name in names if name is not None]
    if len(set(given)) != len(given):
        raise RequestError("rid must differ between the prompts of a batch", field="rid")
    return [uuid.uuid4().hex if name is None else name for name in names]


def _seeded(sampling: CoreSamplingParams, j: int) -> CoreSamplingParams:
    """Give the j-th output of a prompt its own seed, so that the outputs differ.

    Without a seed of the client each output gets a random one, which a snapshot of the request keeps.
    """
    if sampling.seed is None and not sampling.greedy:
        return msgspec.structs.replace(sampling, seed=secrets.randbits(63))
    if sampling.seed is None or j == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + j) & MAX_ROOM)


def check_num_sequences(prompts: Sequence[GenerateRequest], n: int) -> None:
    """Check the number of sequences and of stop patterns of a body, before anything is queued.

    Raises:
        RequestError: 400 naming `n` or `stop_regex`.
    """
    total = len(prompts) * n
    if total > MAX_SEQUENCES:
        raise RequestError(f"{len(prompts)} prompts with n={n} are more than {MAX_SEQUENCES} sequences", field="n")
    patterns = max((len(prompt.sampling.stop_regex) for prompt in prompts), default=0)
    if total * patterns > MAX_PATTERN_SEQUENCES:
        message = f"{patterns} patterns for {total} sequences: their product may be at most {MAX_PATTERN_SEQUENCES}"
        raise RequestError(f"stop_regex: {message}", field="stop_regex")


def check_size(prompts: Sequence[GenerateRequest], n: int, most_tokens: int, field: str) -> None:
    """Check that a body has at most `most_tokens` prompt tokens and `MAX_SENT_CHARS` grammar characters over all
    sequences.

    `field`: the client's name of its prompts.

    Raises:
        RequestError: 400 naming `field` or `n`.
    """
    num_tokens = sum(len(prompt.input_ids) for prompt in prompts)
    if num_tokens * n > most_tokens:
        message = f"{num_tokens} prompt tokens with n={n} are more than {most_tokens}"
        raise RequestError(f"{field}: {message}", field=field if n == 1 else "n")
    grammars = [prompt.sampling.grammar for prompt in prompts]
    if n * sum(len(grammar.text) for grammar in grammars if grammar is not None) > MAX_SENT_CHARS:
        message = f"a grammar for each of {len(prompts) * n} sequences is more than {MAX_SENT_CHARS} characters"
        raise RequestError(message, field="n" if n > 1 else field)


def prompt_request(
    input_ids: list[int], sampling: CoreSamplingParams, logprobs: Logprobs | None = None
) -> GenerateRequest:
    """Return the request of one checked prompt for `make_requests`, which gives each of its sequences rid and room."""
    return GenerateRequest(rid="", input_ids=input_ids, sampling=sampling, logprobs=logprobs)


def make_requests(
    prompts: Sequence[GenerateRequest],
    n: int,
    body: TransferAddress,
    mode: DisaggMode,
    *,
    stream: bool,
    dp_size: int = 1,
    allowed_prefill: HostPatterns | None = None,
    default_port: int | None = None,
    fake_rooms: bool = False,
    default_priority: int = 0,
) -> list[RequestState]:
    """Build all sequences of a body from the requests of its prompts (`prompt_request`).

    `body` has the bootstrap fields, `rid` and `priority`; without one, requests have `default_priority`.
    `default_port`, `fake_rooms`: see `rooms_of`. Each request has a unique internal `rid` that is never reused. So late
    outputs of an aborted request cannot reach another request to which the client gave the same `rid`.

    Raises:
        RequestError: 400 naming the field.
    """
    rank = body.data_parallel_rank
    if rank is not None and not 0 <= rank < dp_size:
        message = f"data_parallel_rank must be in [0, {dp_size}), the replicas of this server, got {rank}"
        raise RequestError(message, field="data_parallel_rank")
    check_num_sequences(prompts, n)
    rooms = rooms_of(body, mode, len(prompts), n, allowed_prefill, default_port=default_port, fake_rooms=fake_rooms)
    names = [name for name in _names(body.rid, len(prompts)) for _ in range(n)]
    batch = body.rid if isinstance(body.rid, str) and len(prompts) > 1 else None
    arrival_s = time.time()
    states = []
    for index, (name, room) in enumerate(zip(names, rooms, strict=True)):
        prompt = prompts[index // n]
        request = msgspec.structs.replace(
            prompt,
            rid=f"{name}.{secrets.token_hex(4)}",
            sampling=_seeded(prompt.sampling, index % n),
            stream=stream,
            room=room,
            arrival_s=arrival_s,
            priority=default_priority if body.priority is None else body.priority,
            replica=rank,
            request_id=current_request_id(),
        )
        states.append(RequestState(request=request, name=name, index=index, batch=batch))
    return states


def with_salts(prompts: Sequence[GenerateRequest], body: Any) -> Sequence[GenerateRequest]:
    """Give each prompt its cache salt, from `cache_salt` and `extra_key` of a body: text, or a list by prompt.

    See `joined_salt`. The salt of a prompt of input embeddings also depends on these.

    Raises:
        RequestError: 400 naming the field, for a salt that is empty, too long, or has a NUL.
    """
    prompts = _with_given_salts(prompts, body)
    if not any(prompt.input_embeds for prompt in prompts):
        return prompts
    return [
        msgspec.structs.replace(prompt, cache_salt=salt_of_embeds(prompt.cache_salt, prompt.input_embeds))
        if prompt.input_embeds
        else prompt
        for prompt in prompts
    ]


def _with_given_salts(prompts: Sequence[GenerateRequest], body: Any) -> Sequence[GenerateRequest]:
    if body.cache_salt is None and body.extra_key is None:
        return prompts
    parts = [
        [check_salt(value, field) for value in scalar_or_list(getattr(body, field), len(prompts), field, str)]
        for field in ("cache_salt", "extra_key")
    ]
    salts = [joined_salt(*both) for both in zip(*parts, strict=True)]
    return [msgspec.structs.replace(prompt, cache_salt=salt) for prompt, salt in zip(prompts, salts, strict=True)]


def check_salt(value: str | None, field: str) -> str | None:
    """Return a cache salt. Raises RequestError, which names `field`, for one that is empty, too long, or has a NUL."""
    if value is not None and (not 0 < len(value) <= MAX_SALT_CHARS or "\0" in value):
        message = f"{field} must be text of 1 to {MAX_SALT_CHARS} characters without NUL"
        raise RequestError(message, field=field)
    return value


def num_prompt_tokens(states: Sequence[RequestState], n: int) -> int:
    """Return the prompt tokens of a body; each prompt counts once, for any `n`."""
    return sum(state.prompt_tokens for state in states[::n])


def attaches(body: TransferAddress) -> bool:
    """Return whether `body` asks for the rest of a stream that this server has taken over; it names no room then."""
    resume: Resume | None = getattr(body, "pdserve_resume", None)
    return resume is not None and resume.attach is not None


def resume_stream(
    states: Sequence[RequestState],
    resume: Resume | None,
    vocab_size: int,
    *,
    stream: bool,
    weights: str,
    logprobs: bool = False,
) -> None:
    """Give the request the output of an earlier attempt on another server; does nothing if `resume` is None.

    `weights`: those of this server, see `weights_name`. `logprobs`: each event repeats the logprobs of all tokens so
    far, if the request wants any.

    Raises:
        RequestError: 400, `resume` does not fit the request; 503, its tokens are of other weights.
    """
    if resume is None:
        return
    if resume.weights not in ("", weights) and resume.attach is None:
        raise weights_mismatch(f"{weights} here, {resume.weights} of the tokens so far").error()
    if not stream or len(states) != 1:
        raise RequestError(f"{RESUME_FIELD} needs a stream of one sequence", field=RESUME_FIELD)
    request = states[0].request
    check_token_ids(resume.token_ids, vocab_size, RESUME_FIELD)
    if len(resume.token_ids) >= max(1, request.sampling.max_new_tokens):
        raise RequestError(f"{RESUME_FIELD} has as many tokens as the request may generate", field=RESUME_FIELD)
    needed = len(resume.token_ids) if logprobs and request.logprobs is not None else 0
    if len(resume.logprobs or ()) != needed:
        raise RequestError(f"{RESUME_FIELD}.logprobs must have {needed} entries", field=RESUME_FIELD)
    logprob_params = request.logprobs
    if logprob_params is not None and resume.token_ids:
        logprob_params = msgspec.structs.replace(logprob_params, prompt_from=None)
    request = msgspec.structs.replace(request, prior_output_ids=resume.token_ids, logprobs=logprob_params)
    if resume.attach is not None:
        request = msgspec.structs.replace(request, rid=resume.attach)
        states[0].attaches = True
    states[0].request = request
    states[0].output_logprobs = resume.token_logprobs
