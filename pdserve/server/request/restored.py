"""A snapshot on its way back to a request: checks of what it claims, and the state that its endpoint goes on from.

The endpoint that began the request validates the client's body again, as if it had just arrived, and makes the request.
`RestoredRequest.apply` then gives that request the tokens, the seed and the KV of the snapshot. So a snapshot can ask
for nothing that a body could not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import orjson

from pdserve.errors import RequestError
from pdserve.http.access import CHAT_PATH, COMPLETIONS_PATH, GENERATE_PATH
from pdserve.protocol.engine_state import EngineReady
from pdserve.protocol.sampling import BODY_DEFAULTS
from pdserve.protocol.snapshot import KVIdentity, RequestSnapshot
from pdserve.server.engine_client.live_requests import RequestState
from pdserve.server.generation import GenerationUpdate, Resume, StreamHead
from pdserve.server.request.custom_params import BUDGET
from pdserve.server.request.intake import check_token_ids
from pdserve.server.request.sampling_fields import RequestLimits

KVRule = Literal["require", "prefer", "ignore"]
"""What happens with the KV of a snapshot: `require` refuses a snapshot whose KV does not fit this server, `prefer` then
computes it again, `ignore` always computes it again.
"""
ENDPOINTS = (GENERATE_PATH, COMPLETIONS_PATH, CHAT_PATH)
"""Paths whose answers go on in their own form. Other requests go on as those of `/generate`."""
NOT_KEPT = ("rid", "pdserve_resume", "data_parallel_rank", "bootstrap_host", "bootstrap_port", "bootstrap_room")
"""Fields of a body that name a place or an earlier try, and are no part of a snapshot."""


def identity_of(ready: EngineReady, adapter: str = "") -> KVIdentity:
    """Return what the KV of this server depends on. `adapter`: digest of the LoRA adapter; empty without one."""
    facts = ready.facts
    return KVIdentity(
        weights=str(facts.get("weights_fingerprint") or ""),
        layout=str(facts.get("layout_fingerprint") or ""),
        dtype=str(facts.get("dtype") or ""),
        page_tokens=int(facts.get("page_tokens") or 0),
        adapter=adapter,
        model=str(facts.get("model_digest") or ""),
    )


def differs(field: str, theirs: object, ours: object) -> RequestError:
    """Return the 409 for a snapshot of a server that differs in `field`."""
    name = f"snapshot.{field}"
    message = f"{name} is {theirs!r}, this server has {ours!r}"
    return RequestError(message, field=name, status=409, code="snapshot_differs")


@dataclasses.dataclass(frozen=True)
class RestoredRequest:
    """A checked snapshot. `kv`: the bytes of each layout group; None: the KV is computed again, or found in a cache."""

    snapshot: RequestSnapshot
    kv: tuple[memoryview, ...] | None = None

    @classmethod
    def of(
        cls, snapshot: RequestSnapshot, data: memoryview, ready: EngineReady, rule: KVRule, *, takes_kv: bool
    ) -> RestoredRequest:
        """Check that this server may continue `snapshot`, whose KV bytes are `data`.

        `takes_kv`: this server can load KV bytes.

        Raises:
            RequestError: 409 naming the field in which this server differs.
        """
        ours = identity_of(ready)
        if snapshot.identity.weights != ours.weights:
            raise differs("identity.weights", snapshot.identity.weights, ours.weights)
        if snapshot.identity.model not in ("", ours.model):
            raise differs("identity.model", snapshot.identity.model, ours.model)
        if snapshot.kv is None or rule == "ignore":
            return cls(snapshot)
        names = ("layout", "dtype", "page_tokens")
        different = [name for name in names if getattr(snapshot.identity, name) != getattr(ours, name)]
        if takes_kv and not different:
            return cls(snapshot, tuple(snapshot.kv.split(data)))
        if rule == "prefer":
            return cls(snapshot)
        if different:
            name = different[0]
            raise differs(f"identity.{name}", getattr(snapshot.identity, name), getattr(ours, name))
        raise RequestError(
            "snapshot.kv: the ranks of this server share the KV, and none can load all of it; restore with kv=prefer",
            field="snapshot.kv",
            status=409,
            code="snapshot_differs",
        )

    @property
    def path(self) -> str:
        """The endpoint whose form the answer has.

        Raises:
            RequestError: 400, there is no such endpoint.
        """
        origin = self.snapshot.origin
        if origin is None:
            return GENERATE_PATH
        if origin.path not in ENDPOINTS:
            raise RequestError(
                f"snapshot.origin.path must be one of {', '.join(ENDPOINTS)}, got {origin.path!r}",
                field="snapshot.origin.path",
            )
        return origin.path

    def body(self) -> dict[str, Any]:
        """Return the body of the request, for its endpoint.

        Raises:
            RequestError: 400, the body is no JSON object.
        """
        origin = self.snapshot.origin
        if origin is None:
            return {**self._native_body(), "rid": self.snapshot.rid}
        try:
            body = orjson.loads(origin.body)
        except orjson.JSONDecodeError as error:
            raise RequestError(f"snapshot.origin.body: {error}", field="snapshot.origin.body") from None
        if not isinstance(body, dict):
            raise RequestError("snapshot.origin.body must be a JSON object", field="snapshot.origin.body")
        kept = {name: value for name, value in body.items() if name not in NOT_KEPT}
        return {**kept, "rid": self.snapshot.rid}

    @property
    def resume(self) -> Resume:
        """What the stream has sent so far."""
        snapshot, origin = self.snapshot, self.snapshot.origin
        stream_id = None if origin is None else origin.stream_id
        head = StreamHead(stream_id or snapshot.rid, None if origin is None else origin.created)
        cached, details = snapshot.cached_tokens, snapshot.cached_details
        return Resume(head, snapshot.output_ids, cached, snapshot.output_logprobs, cached_details=details)

    def head(self) -> dict[str, Any]:
        """Return the fields that the events of the stream so far had in common; empty if it had none."""
        origin = self.snapshot.origin
        return {} if origin is None or origin.stream_id is None else self.resume.head.fields

    def before(self, text: str) -> GenerationUpdate:
        """Return the output so far as one update. `text` is the text of its tokens."""
        update = self.resume.update(text)
        update.prompt_parts = list(self.snapshot.prompt_logprobs)
        return update

    def apply(self, states: Sequence[RequestState], limits: RequestLimits) -> None:
        """Give the request that its endpoint has made from `body` the state of the snapshot.

        Raises:
            RequestError: 400 or 409 naming the field of the snapshot that does not fit the body or this server.
        """
        snapshot = self.snapshot
        if len(states) != 1:
            raise RequestError(f"snapshot.origin.body has {len(states)} sequences", field="snapshot.origin.body")
        state = states[0]
        request = state.request
        if request.input_ids != snapshot.input_ids:
            raise RequestError(
                "snapshot.input_ids are not the tokens of the body here: tokenizer or chat template differ",
                field="snapshot.input_ids",
                status=409,
                code="snapshot_differs",
            )
        check_token_ids(snapshot.output_ids, limits.vocab_size, "snapshot.output_ids")
        for line in snapshot.output_logprobs:
            check_token_ids([token_id for token_id, _ in line.top], limits.vocab_size, "snapshot.output_logprobs")
        if _without_prompt(request.logprobs) != _without_prompt(snapshot.logprobs):
            raise RequestError("snapshot.logprobs are not those of the body", field="snapshot.logprobs")
        given = snapshot.sampling
        if not 0 <= given.min_new_tokens <= given.max_new_tokens:
            raise RequestError("snapshot.sampling.min_new_tokens is out of range", field="snapshot.sampling")
        if given.seed is not None and not 0 <= given.seed < 1 << 63:
            raise RequestError("snapshot.sampling.seed must have 63 bits", field="snapshot.sampling.seed")
        if len(snapshot.input_ids) + given.max_new_tokens > limits.capacity:
            raise RequestError(
                f"snapshot: prompt and max_new_tokens are {len(snapshot.input_ids) + given.max_new_tokens} tokens; at "
                f"most {limits.capacity} fit",
                field="snapshot.sampling.max_new_tokens",
                code="context_length_exceeded",
            )
        if request.lora != snapshot.lora:
            raise differs("lora", snapshot.lora, request.lora)
        sampling = msgspec.structs.replace(
            request.sampling,
            seed=given.seed,
            max_new_tokens=given.max_new_tokens,
            min_new_tokens=given.min_new_tokens,
        )
        logprobs = request.logprobs
        if logprobs is not None and snapshot.output_ids:
            logprobs = msgspec.structs.replace(logprobs, prompt_from=None)
        state.request = msgspec.structs.replace(
            request,
            sampling=sampling,
            logprobs=logprobs,
            prior_output_ids=list(snapshot.output_ids),
            local=True,
            kv_tokens=0 if self.kv is None or snapshot.kv is None else snapshot.kv.num_tokens,
            lora_digest=snapshot.identity.adapter,
        )
        state.kv = self.kv
        state.output_logprobs = list(snapshot.output_logprobs)
        state.prompt_parts = list(snapshot.prompt_logprobs)

    def _native_body(self) -> dict[str, Any]:
        """Return a body of `/generate` for a request that came in another way."""
        snapshot = self.snapshot
        sampling, logprobs = snapshot.sampling, snapshot.logprobs
        params: dict[str, Any] = {name: getattr(sampling, name) for name in BODY_DEFAULTS}
        params |= {
            "max_new_tokens": sampling.max_new_tokens,
            "min_new_tokens": sampling.min_new_tokens,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
            "stop_regex": list(sampling.stop_regex) or None,
            "logit_bias": {str(token): bias for token, bias in (sampling.logit_bias or {}).items()} or None,
        }
        processor = sampling.processor
        if processor is not None:
            params["custom_params"] = orjson.loads(processor.params)
        elif sampling.thinking is not None:
            params["custom_params"] = {BUDGET: sampling.thinking.num_tokens}
        if sampling.grammar is not None and sampling.grammar.kind != "any_text":
            params[sampling.grammar.kind] = sampling.grammar.text
        body: dict[str, Any] = {"input_ids": snapshot.input_ids, "sampling_params": params}
        if processor is not None:
            body["custom_logit_processor"] = processor.name
        if logprobs is not None:
            body |= {
                "return_logprob": True,
                "top_logprobs_num": logprobs.top,
                "token_ids_logprob": list(logprobs.token_ids) or None,
                "logprob_start_len": -1 if logprobs.prompt_from is None else logprobs.prompt_from,
            }
        if snapshot.lora is not None:
            body["lora_path"] = snapshot.lora
        if snapshot.cache_salt:
            body |= zip(("cache_salt", "extra_key"), snapshot.cache_salt.split("\0"), strict=False)  # see `with_salts`
        return body


def _without_prompt(logprobs: Any) -> Any:
    """What of the log probabilities still matters; the rest is of the prompt, or names a server."""
    if logprobs is None or not logprobs.output:
        return None
    return (logprobs.top, logprobs.token_ids)
