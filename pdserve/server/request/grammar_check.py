"""Whether the grammar or the stop patterns of a request compile, before anything is submitted. One for each server.

    take, take_patterns ──> known from before? ──> CompilePool ──> 400 or 503, or the grammar

Endpoints call it through `ServerContext`; it is the only place where text of clients is compiled to be checked.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
from collections.abc import Sequence

from pdserve.config.groups import GrammarConfig
from pdserve.errors import GrammarError, RequestError
from pdserve.grammar.compile import JsonRules
from pdserve.grammar.compile_jobs import Check, CheckGrammar, CheckPattern, CompileResult
from pdserve.protocol.failure import Grammar
from pdserve.protocol.messages import EngineReady
from pdserve.server.http.request_context import current_call
from pdserve.server.request.compile_pool import CompilePool, Compiler
from pdserve.server.request.constraints import Constraint
from pdserve.server.text.stop_regex import check_stop_regex
from pdserve.server.text.tokenizer import Tokenizer

NUM_REMEMBERED = 1024
"""Texts that need no second check, good or bad, the newest; of each a hash is kept."""


class GrammarCheck:
    """Tells good grammars and stop patterns from bad ones, once each. Used on the event loop; `pool` does the work."""

    def __init__(self, config: GrammarConfig, tokenizer: Tokenizer | None, pool: Compiler | None = None) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._pool = pool or CompilePool(JsonRules.of(config), config.grammar_compile_timeout)
        self._vocabulary: asyncio.Task[CompileResult] | None = None
        self._known: collections.OrderedDict[bytes, asyncio.Future[CompileResult]] = collections.OrderedDict()

    async def take(self, constraint: Constraint | None, ready: EngineReady) -> Grammar | None:
        """The grammar of `constraint`, once it is known to be good; None for None. The first takes a second longer.

        Raises:
            RequestError: 400 naming the field: a bad grammar, one that is too large or takes too long to compile, or a
                server without grammars. 503: too much is being compiled.
        """
        if constraint is None:
            return None
        try:
            await self._open_vocabulary(ready)
            verdict = await self._verdict(CheckGrammar(job=0, grammar=constraint.grammar), constraint.grammar.kind)
        except GrammarError as error:
            text = f"{constraint.field}: {error}"
            raise RequestError(text, field=constraint.field, code="invalid_grammar") from error
        _raise(verdict, constraint.field, code="invalid_grammar")
        return constraint.grammar

    async def take_patterns(self, patterns: str | Sequence[str] | None, field: str) -> None:
        """Find out whether `patterns` are regular expressions that may stop a text.

        Raises:
            RequestError: 400 naming `field`: one is none, is too large, or matches the empty text. 503: as `take`.
        """
        for pattern in check_stop_regex(patterns, field):
            _raise(
                await self._verdict(CheckPattern(job=0, pattern=pattern), "stop_regex"), field, code="invalid_request"
            )

    async def warm_up(self, ready: EngineReady) -> None:
        """Start the worker, so that the first grammar does not wait for it."""
        with contextlib.suppress(GrammarError):
            await self._open_vocabulary(ready)

    async def close(self) -> None:
        """End the worker."""
        if self._vocabulary is not None:
            self._vocabulary.cancel()
            await asyncio.gather(self._vocabulary, return_exceptions=True)
        await self._pool.close()

    async def _verdict(self, check: Check, kind: str) -> CompileResult:
        """Known from before, or from the pool. Requests for the same text wait for one check."""
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
        """What says nothing of the text, but of the moment, is asked again."""
        failed = known.cancelled() or known.exception() is not None
        if (failed or known.result().reason == "busy") and self._known.get(key) is known:
            del self._known[key]

    async def _open_vocabulary(self, ready: EngineReady) -> None:
        if self._config.grammar_backend == "none":
            raise GrammarError("this server was started with --grammar-backend none")
        if self._tokenizer is None:
            raise GrammarError("this server has no tokenizer, so that no output can follow a grammar")
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
    """Refuse what the verdict is against. Raises RequestError."""
    if verdict.reason == "busy":
        raise RequestError(
            f"{field}: {verdict.message}", field=field, status=503, code="grammar_compiler_busy", retry_after_s=1
        )
    if verdict.message is not None:
        raise RequestError(f"{field}: {verdict.message}", field=field, code=code)
