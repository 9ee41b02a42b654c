"""Runs checks of grammars and stop patterns in the compile worker, fairly among clients. Used by `GrammarCheck`.

    check ──> FairQueue ──> worker process, a fork per check ──> CompileResult      (grammar/compile_worker)
                  │
                  └─ at most NUM_AT_ONCE checks run, at most NUM_LARGE large ones; a client runs one of each kind

The worker starts with the first check and stays. When the worker dies or times out, it is killed with all checks that
run in it, and the next check starts another worker. Event loop only; `close` leaves no process.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from pdserve.base.log import chosen_format, no_request
from pdserve.errors import RequestError
from pdserve.grammar.compile import JsonRules
from pdserve.grammar.compile_jobs import (
    SMALL_CHARS,
    Check,
    CheckGrammar,
    CheckPattern,
    CompileResult,
    LoadVocabulary,
    Question,
    Setup,
    frame,
    receive_results,
)

log = logging.getLogger(__name__)

NUM_AT_ONCE = 3
NUM_LARGE = 2
"""Fewer than `NUM_AT_ONCE`, so that a slot for small checks always remains."""
MAX_WAITING_OF_CLIENT = 64
MAX_WAITING = 1024
MEMORY_BYTES = 128 << 20
WALL_FACTOR = 30.0
"""Wall-clock limit of a check as a multiple of its processor time limit, for a busy machine."""
GRACE_S = 5.0
"""Seconds after the wall-clock limit until the worker itself counts as stuck."""
LOAD_S = 120.0
WORKER_COMMAND = (sys.executable, "-m", "pdserve.grammar.compile_worker")
_SECRETS = "PDSERVE_"
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
BUSY = "the grammar compiler is overloaded; try again"
GONE = "the grammar compiler exited during the check; try again"


class Compiler(Protocol):
    """The interface of `CompilePool` that `GrammarCheck` uses."""

    async def load(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> CompileResult:
        """Load the vocabulary that grammars are checked against; called once."""
        ...

    async def check(self, text: Check, client: str) -> CompileResult:
        """Check whether `text` compiles.

        Raises:
            RequestError: 503, too many checks wait.
        """
        ...

    async def close(self) -> None:
        """End the running checks."""
        ...


@dataclasses.dataclass(eq=False)
class QueuedCheck:
    """A check that waits for its turn, and its result."""

    check: Check
    client: str
    small: bool
    verdict: asyncio.Future[CompileResult]


class FairQueue:
    """Queue of waiting checks. The next check is of the client that has waited longest since its last turn."""

    def __init__(self) -> None:
        self._waiting: dict[bool, collections.OrderedDict[str, collections.deque[QueuedCheck]]] = {
            True: collections.OrderedDict(),
            False: collections.OrderedDict(),
        }
        self._running: set[tuple[str, bool]] = set()

    def __iter__(self) -> Iterator[QueuedCheck]:
        return (entry for clients in self._waiting.values() for queue in clients.values() for entry in queue)

    def __len__(self) -> int:
        return sum(len(queue) for clients in self._waiting.values() for queue in clients.values())

    def add(self, entry: QueuedCheck) -> None:
        """Add a waiting check.

        Raises:
            RequestError: 503, too many checks wait.
        """
        clients = self._waiting[entry.small]
        if len(clients.get(entry.client, ())) >= MAX_WAITING_OF_CLIENT or len(self) >= MAX_WAITING:
            raise RequestError(BUSY, status=503, code="grammar_compiler_busy", retry_after_s=1)
        clients.setdefault(entry.client, collections.deque()).append(entry)

    def take(self) -> QueuedCheck | None:
        """Return a check that may run now, and count it as running; None: none may. Small checks come first."""
        num_large = sum(not small for _, small in self._running)
        for small in (True, False):
            if len(self._running) >= NUM_AT_ONCE or (not small and num_large >= NUM_LARGE):
                continue
            clients = self._waiting[small]
            for client, queue in clients.items():
                if (client, small) not in self._running:
                    entry = queue.popleft()
                    clients.move_to_end(client)
                    if not queue:
                        del clients[client]
                    self._running.add((client, small))
                    return entry
        return None

    def ended(self, entry: QueuedCheck) -> None:
        """Count `entry` as ended."""
        self._running.discard((entry.client, entry.small))


class WorkerProcess:
    """One worker process and its pipes. Every question gets a result: from the worker, or because the worker exited."""

    def __init__(self, command: Sequence[str], setup: Setup, on_end: Callable[[WorkerProcess], None]) -> None:
        self._command = command
        self._setup = setup
        self._on_end = on_end
        self._asked: dict[int, asyncio.Future[CompileResult]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.WriteTransport | None = None
        self._reading: asyncio.Task[None] | None = None
        self.ended = False

    @property
    def pid(self) -> int | None:
        """Process id, which is also the process group id; None before `start`."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Spawn the worker process.

        Raises:
            OSError: the system cannot create the process.
        """
        self._process = await asyncio.to_thread(self._spawn)
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._process.stdout)
        self._writer, _ = await loop.connect_write_pipe(asyncio.Protocol, self._process.stdin)
        self._writer.write(frame(self._setup))
        self._reading = asyncio.create_task(self._read(reader), context=no_request())

    def _spawn(self) -> subprocess.Popen[bytes]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(_SECRETS)}
        env |= dict.fromkeys(_ONE_THREAD, "1")
        pipe = subprocess.PIPE
        return subprocess.Popen(self._command, env=env, stdin=pipe, stdout=pipe, process_group=0)

    async def ask(self, question: Question, job: int, timeout_s: float) -> CompileResult:
        """Send a question and return the result; `busy` on a timeout, after which the worker is killed."""
        if self.ended or self._writer is None:
            return CompileResult(job=job, reason="busy", message=GONE)
        answer = self._asked[job] = asyncio.get_running_loop().create_future()
        self._writer.write(frame(question))
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            log.error("the compile worker (pid %s) did not answer within %g s; killing it", self.pid, timeout_s)
            self.kill()
            return CompileResult(job=job, reason="busy", message=GONE)
        finally:
            self._asked.pop(job, None)

    def kill(self) -> None:
        """Kill the worker, and all checks that run in it."""
        self.ended = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Kill the worker and wait until it has exited."""
        self.kill()
        if self._reading is not None:
            await self._reading

    async def _read(self, reader: asyncio.StreamReader) -> None:
        assert self._process is not None, "started"
        buffer = bytearray()
        try:
            while piece := await reader.read(1 << 16):
                buffer += piece
                for verdict in receive_results(buffer):
                    asked = self._asked.get(verdict.job)
                    if asked is not None and not asked.done():
                        asked.set_result(verdict)
        finally:
            self.kill()
            if self._writer is not None:
                self._writer.close()
            for job, asked in self._asked.items():
                if not asked.done():
                    asked.set_result(CompileResult(job=job, reason="busy", message=GONE))
            self._on_end(self)
            await asyncio.to_thread(self._process.wait)


class CompilePool:
    """Pool of checks in one compile worker; see the module docstring. `cpu_s`: processor seconds that a check may
    take.
    """

    def __init__(self, rules: JsonRules, cpu_s: float, *, command: Sequence[str] | None = None) -> None:
        """`command` None: this package's worker, with the log format of this process."""
        self._wall_s = WALL_FACTOR * cpu_s
        self._setup = Setup(rules=rules, cpu_s=cpu_s, memory_bytes=MEMORY_BYTES, wall_s=self._wall_s)
        self._command = command or (*WORKER_COMMAND, chosen_format())
        self._jobs = itertools.count()
        self._queue = FairQueue()
        self._starting = asyncio.Lock()
        self._worker: WorkerProcess | None = None
        self._vocabulary: LoadVocabulary | None = None
        self._tasks: set[asyncio.Task[CompileResult]] = set()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the worker; None: no worker yet."""
        return None if self._worker is None else self._worker.pid

    async def load(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> CompileResult:
        """See `Compiler.load`. Later workers load the same vocabulary."""
        job = next(self._jobs)
        vocabulary = LoadVocabulary(
            job=job, tokenizer_json=tokenizer_json, vocab_size=vocab_size, eos_token_ids=tuple(eos_token_ids)
        )
        try:
            worker = await self._open()
        except OSError as error:
            return CompileResult(job=job, reason="busy", message=f"no grammar can be compiled: {error}")
        verdict = await worker.ask(vocabulary, job, LOAD_S)
        if verdict.message is None:
            self._vocabulary = vocabulary
        return verdict

    async def check(self, text: Check, client: str) -> CompileResult:
        """See `Compiler.check`."""
        small = isinstance(text, CheckPattern) or len(text.grammar.text) <= SMALL_CHARS
        entry = QueuedCheck(text, client, small, asyncio.get_running_loop().create_future())
        self._queue.add(entry)
        self._begin()
        return await entry.verdict

    async def close(self) -> None:
        """See `Compiler.close`. Waiting checks get a `busy` result. No check may be added afterwards."""
        self._closed = True
        for entry in self._queue:
            if not entry.verdict.done():
                entry.verdict.set_result(CompileResult(job=0, reason="busy", message=GONE))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._worker is not None:
            await self._worker.close()

    def _begin(self) -> None:
        while (entry := self._queue.take()) is not None:
            if entry.verdict.done():  # the request was cancelled
                self._queue.ended(entry)
                continue
            task = asyncio.create_task(self._ask(entry.check), context=no_request())
            self._tasks.add(task)
            task.add_done_callback(functools.partial(self._ended, entry))

    def _ended(self, entry: QueuedCheck, task: asyncio.Task[CompileResult]) -> None:
        """Handle the end of a check: it has a result, or was cancelled, perhaps before its first step."""
        self._tasks.discard(task)
        self._queue.ended(entry)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("a grammar or stop pattern check failed", exc_info=error)
        if not entry.verdict.done():
            lost = task.cancelled() or error is not None
            entry.verdict.set_result(CompileResult(job=0, reason="busy", message=GONE) if lost else task.result())
        if not self._closed:
            self._begin()

    async def _ask(self, check: Check) -> CompileResult:
        job = next(self._jobs)
        numbered: Check
        if isinstance(check, CheckGrammar):
            numbered = CheckGrammar(job=job, grammar=check.grammar)
        else:
            numbered = CheckPattern(job=job, pattern=check.pattern)
        try:
            worker = await self._open()
        except OSError as error:
            log.error("the compile worker cannot be started: %s", error)
            return CompileResult(job=job, reason="busy", message=f"nothing can be compiled: {error}")
        return await worker.ask(numbered, job, self._wall_s + GRACE_S)

    async def _open(self) -> WorkerProcess:
        """Return the worker; start one if none runs."""
        async with self._starting:
            if self._worker is not None and not self._worker.ended:
                return self._worker
            worker = WorkerProcess(self._command, self._setup, self._on_end)
            await worker.start()
            self._worker = worker
            if self._vocabulary is not None:
                await worker.ask(self._vocabulary, self._vocabulary.job, LOAD_S)
            return worker

    def _on_end(self, worker: WorkerProcess) -> None:
        if not self._closed:
            log.error("the compile worker (pid %s) exited; the next check starts another", worker.pid)
