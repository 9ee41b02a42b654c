"""Converts the grammar fields of a body to one constraint on its outputs, and checks that it compiles.

The conversions are pure. `GrammarCheck` checks grammars and stop patterns before submission; a server has one.

    take, take_patterns ──> cached result? ──> CompilePool ──> 400 or 503, or the grammar

Endpoints call it through `ServerContext`. Only this module compiles untrusted text in order to check it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from pdserve.config.groups import GrammarConfig
from pdserve.errors import GrammarError, RequestError
from pdserve.grammar.compile import MAX_CHARS, JsonRules
from pdserve.grammar.compile_jobs import Check, CheckGrammar, CheckPattern, CompileResult
from pdserve.protocol.engine_state import EngineReady
from pdserve.protocol.sampling import Grammar, GrammarKind
from pdserve.server.http.middleware import current_call
from pdserve.server.request.compile_pool import CompilePool, Compiler
from pdserve.server.request.schemas import ConstraintFields, NativeSampling
from pdserve.server.text.parsers.thinking import ReasoningFormat
from pdserve.server.text.stop_regex import check_stop_regex
from pdserve.server.text.tokenizer import Tokenizer

SPACE_AFTER_REASONING = r"[ \n]{0,4}"


def reasoning_grammar(constraint: Constraint, thinking: ReasoningFormat, inside: bool | None) -> Constraint:
    """Return `constraint` for the text after the reasoning. `inside`: see `ReasoningFormat.begins_inside`.

    With `inside` None the model may begin with reasoning, or answer at once. A grammar that the client wrote by hand
    (`ebnf`, `structural_tag`) covers the whole output and stays unchanged.

    Raises:
        RequestError: 400 naming the field: a schema that was given as text is no JSON.
    """
    try:
        answer = _node(constraint.grammar)
    except (ValueError, RecursionError) as error:
        text = f"{constraint.field}: the schema is not valid JSON: {error}"
        raise RequestError(text, field=constraint.field, code="invalid_grammar") from error
    if answer is None or inside is False:
        return constraint
    closing = {
        "type": "triggered_tags",
        "triggers": [thinking.closing],
        "tags": [{"begin": thinking.closing, "content": _spaced(answer), "end": ""}],
        "at_least_one": True,
        "stop_after_first": True,
    }
    whole: dict[str, Any] = closing
    if inside is None:
        opening = {"type": "const_string", "value": thinking.opening}
        whole = {"type": "or", "elements": [{"type": "sequence", "elements": [opening, closing]}, answer]}
    text = json.dumps({"type": "structural_tag", "format": whole}, ensure_ascii=False, separators=(",", ":"))
    return Constraint(Grammar(kind="structural_tag", text=text), constraint.field)


def _node(grammar: Grammar) -> dict[str, Any] | None:
    if grammar.kind == "json_schema":
        return {"type": "json_schema", "json_schema": json.loads(grammar.text)}
    if grammar.kind == "regex":
        return {"type": "regex", "pattern": grammar.text}
    return None


def _spaced(answer: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": [{"type": "regex", "pattern": SPACE_AFTER_REASONING}, answer]}


ANY_OBJECT = {"type": "object"}
_META = re.compile(r"[\\.+*?()|\[\]{}^$/&~#-]")


@dataclasses.dataclass(frozen=True)
class Constraint:
    """A grammar, and the body field that it came from."""

    grammar: Grammar
    field: str


def native_constraint(fields: NativeSampling, prefix: str) -> Constraint | None:
    """Return the constraint in `sampling_params` of `/generate`: `json_schema`, `regex`, `ebnf` or `structural_tag`.

    `prefix` is the name of `sampling_params` in errors. None: the output is not constrained.

    Raises:
        RequestError: 400 naming the field: it has the wrong type, or is the second constraint.
    """
    return _only(
        _text_constraint("json_schema", fields.json_schema, f"{prefix}.json_schema"),
        _text_constraint("regex", fields.regex, f"{prefix}.regex"),
        _text_constraint("ebnf", fields.ebnf, f"{prefix}.ebnf"),
        _text_constraint("structural_tag", fields.structural_tag, f"{prefix}.structural_tag"),
    )


def openai_constraint(fields: ConstraintFields) -> Constraint | None:
    """Return the constraint of a chat or completion body, from any of its fields; None: the output is not constrained.

    Raises:
        RequestError: 400 naming the field: it has the wrong type, or is the second constraint.
    """
    return _only(
        _response_format(fields.response_format),
        _text_constraint("json_schema", fields.json_schema, "json_schema"),
        _text_constraint("regex", fields.regex, "regex"),
        _text_constraint("ebnf", fields.ebnf, "ebnf"),
        _text_constraint("structural_tag", fields.structural_tag, "structural_tag"),
        _text_constraint("json_schema", fields.guided_json, "guided_json"),
        _text_constraint("regex", fields.guided_regex, "guided_regex"),
        _choice(fields.guided_choice, "guided_choice"),
        _text_constraint("ebnf", fields.guided_grammar, "guided_grammar"),
        _structured_outputs(fields.structured_outputs),
    )


def schema_constraint(schema: Any, field: str, *, lenient: bool = False) -> Constraint:
    """Return the constraint to JSON that matches `schema`, an object or a boolean.

    `lenient`: keywords that the grammar engine does not know are ignored; otherwise they are refused.

    Raises:
        RequestError: 400 naming `field`.
    """
    if not isinstance(schema, dict | bool):
        raise RequestError(f"{field} must be a JSON schema, got {type(schema).__name__}", field=field)
    if lenient and isinstance(schema, dict):
        options = schema.get("x-guidance", {})
        schema = {**schema, "x-guidance": {"lenient": True, **options}} if isinstance(options, dict) else schema
    return Constraint(Grammar(kind="json_schema", text=_dump(schema, field)), field)


def _only(*asked: Constraint | None) -> Constraint | None:
    """Return the only constraint of `asked`; None if there is none."""
    constraints = [constraint for constraint in asked if constraint is not None]
    if len(constraints) > 1:
        names = " and ".join(constraint.field for constraint in constraints)
        raise RequestError(f"{names} cannot be combined: a request accepts one grammar", field=constraints[1].field)
    return constraints[0] if constraints else None


def _text_constraint(kind: GrammarKind, value: Any, field: str) -> Constraint | None:
    """Return the constraint of one field. Grammars are text; schemas and structural tags may also be JSON values."""
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        if kind not in ("json_schema", "structural_tag"):
            raise RequestError(f"{field} must be a string, got {type(value).__name__}", field=field)
        if kind == "json_schema":
            return schema_constraint(value, field)
        value = _dump(value, field)
    return Constraint(Grammar(kind=kind, text=value), field)


def _response_format(value: Any) -> Constraint | None:
    field = "response_format"
    if value is None:
        return None
    if not isinstance(value, dict):
        raise RequestError(f"{field} must be an object, got {type(value).__name__}", field=field)
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return schema_constraint(value.get("schema") or ANY_OBJECT, f"{field}.schema")
        case "json_schema":
            return _named_schema(value.get("json_schema"), f"{field}.json_schema")
        case "structural_tag":
            return _text_constraint("structural_tag", value, field)
        case kind:
            known = "text, json_object, json_schema or structural_tag"
            raise RequestError(f"{field}.type must be {known}, got {kind!r}", field=f"{field}.type")


def _named_schema(value: Any, field: str) -> Constraint:
    """OpenAI's `{name, schema, strict, description}`. The schema is enforced whatever `strict` is; false also allows
    keywords that cannot be enforced.
    """
    if not isinstance(value, dict):
        raise RequestError(f"{field} must be an object with name and schema", field=field)
    strict = value.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"{field}.strict must be true or false", field=f"{field}.strict")
    if not isinstance(value.get("name", ""), str):
        raise RequestError(f"{field}.name must be a string", field=f"{field}.name")
    if value.get("schema") is None:
        raise RequestError(f"{field}.schema is missing", field=f"{field}.schema")
    return schema_constraint(value["schema"], f"{field}.schema", lenient=strict is False)


def _choice(options: Any, field: str) -> Constraint | None:
    """Return the constraint to one of several texts."""
    if options is None:
        return None
    if not isinstance(options, list) or not options or not all(isinstance(text, str) and text for text in options):
        raise RequestError(f"{field} must be a list of strings that are not empty", field=field)
    pattern = "|".join(_META.sub(r"\\\g<0>", text) for text in options)
    return Constraint(Grammar(kind="regex", text=f"({pattern})"), field)


def _structured_outputs(value: dict[str, Any] | None) -> Constraint | None:
    """Return the constraint of vLLM's newer field `structured_outputs`."""
    field = "structured_outputs"
    given = {name: entry for name, entry in (value or {}).items() if entry is not None and entry is not False}
    found: list[Constraint | None] = []
    for name, entry in given.items():
        where = f"{field}.{name}"
        match name:
            case "json":
                found.append(_text_constraint("json_schema", entry, where))
            case "json_object":
                found.append(schema_constraint(ANY_OBJECT, where))
            case "regex":
                found.append(_text_constraint("regex", entry, where))
            case "choice":
                found.append(_choice(entry, where))
            case "grammar":
                found.append(_text_constraint("ebnf", entry, where))
            case "structural_tag":
                found.append(_text_constraint("structural_tag", entry, where))
            case _:
                raise RequestError(f"{where} is not supported by this server", field=where, code="unsupported")
    return _only(*found)


def _dump(value: Any, field: str) -> str:
    """Serialize `value` to JSON. The order of keys is kept: it is the order of keys in the output."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{field} is not valid JSON: {error}", field=field) from error
    if len(text) > MAX_CHARS:
        raise RequestError(f"{field} has {len(text)} characters; the maximum is {MAX_CHARS}", field=field)
    return text


NUM_REMEMBERED = 1024
"""Number of recent results, good and bad, that are cached, by a hash of the text."""


class GrammarCheck:
    """Checks grammars and stop patterns and caches the results. Used on the event loop; `pool` compiles."""

    def __init__(self, config: GrammarConfig, tokenizer: Tokenizer | None, pool: Compiler | None = None) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._pool = pool or CompilePool(JsonRules.of(config), config.grammar_compile_timeout)
        self._vocabulary: asyncio.Task[CompileResult] | None = None
        self._known: collections.OrderedDict[bytes, asyncio.Future[CompileResult]] = collections.OrderedDict()

    async def take(self, constraint: Constraint, ready: EngineReady) -> Grammar:
        """Check the grammar of `constraint` and return it. The first check takes a second longer.

        Raises:
            RequestError: 400 naming the field: the grammar is invalid, too large or too slow to compile, or this server
                has no
                grammars. 503: too many checks wait.
        """
        try:
            await self._open_vocabulary(ready)
            if constraint.grammar.kind == "any_text":
                return constraint.grammar
            verdict = await self._verdict(CheckGrammar(job=0, grammar=constraint.grammar), constraint.grammar.kind)
        except GrammarError as error:
            text = f"{constraint.field}: {error}"
            raise RequestError(text, field=constraint.field, code="invalid_grammar") from error
        _raise(verdict, constraint.field, code="invalid_grammar")
        return constraint.grammar

    async def take_patterns(self, patterns: str | Sequence[str], field: str) -> None:
        """Check that `patterns` are valid stop patterns.

        Raises:
            RequestError: 400 naming `field`: a pattern is no regular expression, too large, or matches the empty text.
                503: as
                `take`.
        """
        for pattern in check_stop_regex(patterns, field):
            _raise(
                await self._verdict(CheckPattern(job=0, pattern=pattern), "stop_regex"), field, code="invalid_request"
            )

    async def warm_up(self, ready: EngineReady) -> None:
        """Start the compile worker and load the vocabulary, so that the first grammar does not wait for them."""
        with contextlib.suppress(GrammarError):
            await self._open_vocabulary(ready)

    async def close(self) -> None:
        """Stop the compile worker."""
        if self._vocabulary is not None:
            self._vocabulary.cancel()
            await asyncio.gather(self._vocabulary, return_exceptions=True)
        await self._pool.close()

    async def _verdict(self, check: Check, kind: str) -> CompileResult:
        """Return the cached result or check with the pool. Concurrent requests for one text share a check."""
        text = check.pattern if isinstance(check, CheckPattern) else check.grammar.text
        key = hashlib.sha256(f"{kind}\0{text}".encode(errors="surrogatepass")).digest()
        known = self._known.get(key)
        if known is None:
            call = current_call()
            client = "" if call is None else call.client
            known = asyncio.ensure_future(self._pool.check(check, client))
            known.add_done_callback(lambda done: self._forget_unclear(key, done))
            self._known[key] = known
            while len(self._known) > NUM_REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return await asyncio.shield(known)

    def _forget_unclear(self, key: bytes, known: asyncio.Future[CompileResult]) -> None:
        """Remove a result from the cache if it depends on load or failures, so that the text is checked again."""
        failed = known.cancelled() or known.exception() is not None
        if (failed or known.result().reason == "busy") and self._known.get(key) is known:
            del self._known[key]

    async def _open_vocabulary(self, ready: EngineReady) -> None:
        if self._config.grammar_backend == "none":
            raise GrammarError("this server was started with --grammar-backend none")
        if self._tokenizer is None:
            raise GrammarError("this server has no tokenizer, which grammars need")
        if self._vocabulary is None:
            self._vocabulary = asyncio.create_task(self._load(self._tokenizer, ready))
        verdict = await asyncio.shield(self._vocabulary)
        if verdict.message is not None:
            self._vocabulary = None  # the next request tries again
            raise GrammarError(verdict.message)

    async def _load(self, tokenizer: Tokenizer, ready: EngineReady) -> CompileResult:
        text = await asyncio.to_thread(tokenizer.as_json)
        return await self._pool.load(text, ready.vocab_size, ready.eos_token_ids)


def _raise(verdict: CompileResult, field: str, *, code: str) -> None:
    """Raise the error of a failed check.

    Raises:
        RequestError: 503 for a `busy` result, 400 for an invalid text.
    """
    if verdict.reason == "busy":
        raise RequestError(
            f"{field}: {verdict.message}", field=field, status=503, code="grammar_compiler_busy", retry_after_s=1
        )
    if verdict.message is not None:
        raise RequestError(f"{field}: {verdict.message}", field=field, code=code)
