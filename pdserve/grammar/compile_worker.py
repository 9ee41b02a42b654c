"""The compile worker: `python -m pdserve.grammar.compile_worker`, spawned by `server/compile_pool`.

It keeps engine and vocabulary loaded and forks a child for each check. What a hostile grammar takes is the child's:
processor time (a timer kills it), memory (`RLIMIT_AS`), stack, or its life. The worker itself runs nothing of a
client's.

    read a check ──> fork ──> child: limits, compile, write the verdict, exit
                      └─ child died ──> the worker writes the verdict

It ends when its standard input does. One thread, because it forks.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
from collections.abc import Mapping

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

STACK_BYTES = 4 << 20
"""Of a child. The executor's threads have more, so that what passes here does not run out of stack there."""
NICENESS = 5
"""Requests that run come before large grammars that are checked."""
_READ_BYTES = 1 << 20
_CAUSES: Mapping[int, Reason] = {
    signal.SIGPROF: "slow", signal.SIGALRM: "busy", signal.SIGXCPU: "slow", signal.SIGKILL: "memory",
    signal.SIGABRT: "memory", signal.SIGSEGV: "crashed", signal.SIGBUS: "crashed",
}  # fmt: skip
"""A failed allocation aborts in the engine; SIGKILL is the system's answer to a lack of memory."""


class CompileWorker:
    """See the file's docstring. Reads `source`, writes `sink`: file descriptors of pipes."""

    def __init__(self, source: int, sink: int) -> None:
        self._source = source
        self._sink = sink
        self._poller = select.poll()
        self._poller.register(source, select.POLLIN)
        self._setup: Setup | None = None
        self._vocabulary: Vocabulary | None = None
        self._children: dict[int, tuple[int, int]] = {}
        """By file descriptor of a child: its pid, its job."""

    def run(self) -> None:
        """Until the source ends; then no child is left."""
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
            self._write(CompileResult(job=check.job, reason="busy", message=f"no process can be made for it: {error}"))
            return
        if pid == 0:
            self._be_child(check)
        child = os.pidfd_open(pid)
        self._children[child] = pid, check.job
        self._poller.register(child, select.POLLIN)

    def _be_child(self, check: Check) -> None:
        """Never returns."""
        status = 1
        try:
            setup = self._setup
            assert setup is not None, "Setup comes first"
            if isinstance(check, CheckGrammar) and len(check.grammar.text) > SMALL_CHARS:
                os.nice(NICENESS)
            os.dup2(os.open(os.devnull, os.O_RDWR), 2)  # panics of the engine are told by verdicts
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
        assert self._setup is not None, "it has had a child"
        match reason:
            case "slow":
                return f"it takes more than {self._setup.cpu_s:g} s of a processor to compile"
            case "memory":
                return f"it takes more than {self._setup.memory_bytes >> 20} MiB to compile"
            case "busy":
                return f"it was not compiled within {self._setup.wall_s:g} s, because this machine is busy; try again"
            case _:
                return "it is too deep for the grammar engine"

    def _write(self, verdict: CompileResult) -> None:
        os.write(self._sink, frame(verdict))  # less than PIPE_BUF: whole, or not at all


def main() -> None:
    """Serve standard input and output."""
    sink = os.dup(1)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import numpy  # noqa: F401  children shall find them loaded
    import regex  # noqa: F401

    with contextlib.suppress(ImportError):
        import llguidance  # noqa: F401
    with contextlib.suppress(BrokenPipeError):
        CompileWorker(0, sink).run()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
