"""The compile worker: `python -m pdserve.grammar.compile_worker`, spawned by `server/request/compile_pool`.
Its argument is the log format.

The worker keeps llguidance and the vocabulary loaded and forks a child for each check. A hostile grammar can only use
up the child's processor time (a timer kills the child), memory (`RLIMIT_AS`) and stack, or crash the child. The worker
itself compiles no client text.

    read a check ──> fork ──> child: set limits, compile, write the result, exit
                      └─ child died ──> the worker writes the result

The worker exits when its standard input ends. It has one thread, because it forks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
import signal
import sys
from collections.abc import Mapping

from pdserve.base.log import setup_logging
from pdserve.errors import GrammarError
from pdserve.grammar.compile_jobs import (
    SMALL_CHARS,
    Check,
    CheckGrammar,
    CompileResult,
    LoadVocabulary,
    Question,
    Reason,
    Setup,
    compile_one,
    frame,
    limit_memory,
    take_questions,
)
from pdserve.grammar.vocabulary import Vocabulary

log = logging.getLogger(__name__)

STACK_BYTES = 4 << 20
"""Stack of a child. The executor's threads have more, so a grammar that compiles here does not overflow their stack."""
NICENESS = 5
"""Niceness of checks of large grammars: running requests have priority."""
_READ_BYTES = 1 << 20
_CAUSES: Mapping[int, Reason] = {
    signal.SIGPROF: "slow", signal.SIGALRM: "busy", signal.SIGXCPU: "slow", signal.SIGKILL: "memory",
    signal.SIGABRT: "memory", signal.SIGSEGV: "crashed", signal.SIGBUS: "crashed",
}  # fmt: skip
"""Cause of a child's death, by signal. llguidance aborts on a failed allocation; the kernel sends SIGKILL when out of
memory.
"""


class CompileWorker:
    """Serves checks; see the module docstring. Reads `source` and writes `sink`, file descriptors of pipes."""

    def __init__(self, source: int, sink: int) -> None:
        self._source = source
        self._sink = sink
        self._poller = select.poll()
        self._poller.register(source, select.POLLIN)
        self._setup: Setup | None = None
        self._vocabulary: Vocabulary | None = None
        self._children: dict[int, tuple[int, int]] = {}
        """By pidfd of a child: its pid and its job."""

    def run(self) -> None:
        """Serve until the source ends, then kill the remaining children."""
        buffer = bytearray()
        try:
            while True:
                for file, _ in self._poller.poll():
                    if file != self._source:
                        self._reap(file)
                        continue
                    piece = os.read(self._source, _READ_BYTES)
                    if not piece:
                        return
                    buffer += piece
                    for question in take_questions(buffer):
                        self._take(question)
        finally:
            for pid, _ in self._children.values():
                os.kill(pid, signal.SIGKILL)

    def _take(self, question: Question) -> None:
        match question:
            case Setup():
                self._setup = question
            case LoadVocabulary():
                self._write(self._load(question))
            case _:
                self._fork(question)

    def _load(self, question: LoadVocabulary) -> CompileResult:
        try:
            self._vocabulary = Vocabulary(question.tokenizer_json, question.vocab_size, question.eos_token_ids)
        except GrammarError as error:
            return CompileResult(job=question.job, reason="refused", message=str(error)[:1000])
        return CompileResult(job=question.job)

    def _fork(self, check: Check) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            self._write(CompileResult(job=check.job, reason="busy", message=f"cannot fork a process for it: {error}"))
            return
        if pid == 0:
            self._be_child(check)
        child = os.pidfd_open(pid)
        self._children[child] = pid, check.job
        self._poller.register(child, select.POLLIN)

    def _be_child(self, check: Check) -> None:
        """Run one check in the child. Never returns."""
        status = 1
        try:
            setup = self._setup
            assert setup is not None, "Setup is the first message"
            if isinstance(check, CheckGrammar) and len(check.grammar.text) > SMALL_CHARS:
                os.nice(NICENESS)
            os.dup2(os.open(os.devnull, os.O_RDWR), 2)  # the result reports panics of llguidance
            limit_memory(setup.memory_bytes)
            resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
            signal.setitimer(signal.ITIMER_REAL, setup.wall_s)
            signal.setitimer(signal.ITIMER_PROF, setup.cpu_s)
            self._write(compile_one(check, setup.rules, self._vocabulary))
            status = 0
        finally:
            os._exit(status)

    def _reap(self, child: int) -> None:
        pid, job = self._children.pop(child)
        self._poller.unregister(child)
        os.close(child)
        _, status = os.waitpid(pid, 0)
        if status:
            reason = _CAUSES.get(os.WTERMSIG(status), "crashed") if os.WIFSIGNALED(status) else "crashed"
            self._write(CompileResult(job=job, reason=reason, message=self._told(reason)))

    def _told(self, reason: Reason) -> str:
        assert self._setup is not None, "a child needs a Setup"
        match reason:
            case "slow":
                return f"it takes more than {self._setup.cpu_s:g} s of a processor to compile"
            case "memory":
                return f"it takes more than {self._setup.memory_bytes >> 20} MiB to compile"
            case "busy":
                return f"it was not compiled within {self._setup.wall_s:g} s, because this machine is busy; try again"
            case _:
                return "it is nested too deeply for the grammar engine"

    def _write(self, verdict: CompileResult) -> None:
        os.write(self._sink, frame(verdict))  # shorter than PIPE_BUF, so the write is atomic


def main() -> None:
    """Run the worker on standard input and output."""
    setup_logging("warning", "compile worker", "json" if sys.argv[1:] == ["json"] else "text")
    sink = os.dup(1)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import numpy  # noqa: F401  loaded before the forks
    import regex  # noqa: F401

    with contextlib.suppress(ImportError):
        import llguidance  # noqa: F401
    try:
        CompileWorker(0, sink).run()
    except BrokenPipeError:
        pass  # the server has ended
    except Exception:
        log.exception("the compile worker has failed")
        sys.exit(1)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
