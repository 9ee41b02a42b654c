"""Checks that the grammar and stop patterns of a request compile, before submission. One per server.

    take, take_patterns ──> cached result? ──> CompilePool ──> 400 or 503, or the grammar

Endpoints call it through `ServerContext`. Only this module compiles untrusted text in order to check it.
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
from pdserve.protocol.grammar import Grammar
from pdserve.protocol.messages import EngineReady
from pdserve.server.http.calls import current_call
from pdserve.server.request.compile_pool import CompilePool, Compiler
from pdserve.server.request.constraints import Constraint
from pdserve.server.text.stop_regex import check_stop_regex
from pdserve.server.text.tokenizer import Tokenizer

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

    async def take(self, constraint: Constraint | None, ready: EngineReady) -> Grammar | None:
        """Check the grammar of `constraint` and return it; None for None. The first check takes a second longer.

        Raises:
            RequestError: 400 naming the field: the grammar is invalid, too large or too slow to compile, or this server
                has no
                grammars. 503: too many checks wait.
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
