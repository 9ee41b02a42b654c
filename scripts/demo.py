"""Sends a question to a pdserve service through the `openai` client, streams the answer, and prints its timing.

With `--base-url` it uses a running service. Otherwise it starts `pdserve.launch_local` on free ports (unknown flags go
there) and ends it afterwards. `--once` ends after one answer; without it a chat on stdin follows. Called by
`scripts/demo.sh`, or directly.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import openai
from openai.types.chat import ChatCompletionMessageParam

from pdserve.base.process import Child, ChildError, ServerReady
from pdserve.protocol.messages import RequestTiming

QUESTION = "Why is the sky blue? Answer in three sentences."
READY_PREFIX = "ready: OPENAI_BASE_URL="
STOP_S = 30.0
LOG_TAIL_LINES = 15

TTFT_PARTS = (
    ("queue", "queue_s"),
    ("bootstrap", "bootstrap_s"),
    ("prefill", "prefill_s"),
    ("transfer", "transfer_s"),
)


@dataclasses.dataclass(kw_only=True)
class Answer:
    """One streamed answer. `arrivals_s`: when its chunks arrived, in seconds since the request was sent."""

    text: str = ""
    arrivals_s: list[float] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    timing: RequestTiming | None = None


def parse_flags(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Parse the demo's flags; the second value has the flags for the servers that it starts."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    add = parser.add_argument
    add("--base-url", help="a running service, such as http://127.0.0.1:8000/v1; one is started when absent")
    add("--api-key", default="none")
    add("--model-path", default="smollm2", help="model of the service to start")
    add("--question", default=QUESTION)
    add("--max-tokens", type=int, default=128, help="longest answer in tokens")
    add("--temperature", type=float, default=0.0)
    add("--once", action="store_true", help="end after one answer")
    add("--log-dir", type=Path, help="directory for the logs of started servers; default: a new temporary one")
    add("--ready-timeout", type=float, default=900.0, help="seconds until the service must be ready")
    args, rest = parser.parse_known_args(argv)
    if args.base_url is not None and rest:
        parser.error(f"flags for servers cannot be used with --base-url: {' '.join(rest)}")
    return args, rest


def read_ready(line: str) -> ServerReady | None:
    """Parse the base URL in launch_local's last start-up line; None for another line."""
    if not line.startswith(READY_PREFIX):
        return None
    return ServerReady(role="local", url=line.removeprefix(READY_PREFIX).split()[0])


@contextlib.contextmanager
def local_service(args: argparse.Namespace, server_flags: Sequence[str]) -> Iterator[str]:
    """Start a service, yield its base URL, end it. Raises ChildError when it does not become ready."""
    logs = args.log_dir or Path(tempfile.mkdtemp(prefix="pdserve-demo-"))
    argv = [sys.executable, "-m", "pdserve.launch_local", "--model-path", args.model_path, "--router-port", "0"]
    argv += ["--log-dir", str(logs), "--ready-timeout", str(args.ready_timeout), *server_flags]
    print(f"starting prefill, decode and router (logs: {logs})", flush=True)
    child = Child("launch_local", argv, on_line=lambda line: print(f"  {line}", flush=True), read_ready=read_ready)
    try:
        yield child.wait_ready(args.ready_timeout + STOP_S).url
    except ChildError:
        show_logs(logs)
        raise
    finally:
        child.end(STOP_S)


def show_logs(logs: Path) -> None:
    """Print the last lines of every process's log on stderr."""
    for path in sorted(logs.glob("*.log")):
        print(f"--- {path}", file=sys.stderr)
        print("\n".join(path.read_text().splitlines()[-LOG_TAIL_LINES:]), file=sys.stderr)


def ask(
    client: openai.OpenAI, model: str, messages: list[ChatCompletionMessageParam], args: argparse.Namespace
) -> Answer:
    """Request one answer and stream it to stdout."""
    answer = Answer()
    began = time.perf_counter()
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_meta_info": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            answer.finish_reason = choice.finish_reason or answer.finish_reason
            if choice.delta.content:
                answer.arrivals_s.append(time.perf_counter() - began)
                answer.text += choice.delta.content
                print(choice.delta.content, end="", flush=True)
        if chunk.usage is not None:
            answer.prompt_tokens = chunk.usage.prompt_tokens
            answer.completion_tokens = chunk.usage.completion_tokens
        extension = (chunk.model_extra or {}).get("pdserve")
        if extension is not None:
            answer.timing = msgspec.convert(extension, RequestTiming)
    print(flush=True)
    return answer


def report(answer: Answer) -> Iterator[str]:
    """Yield the lines of the report on an answer."""
    yield f"prompt {answer.prompt_tokens} tokens, answer {answer.completion_tokens} tokens ({answer.finish_reason})"
    if answer.timing is not None:
        yield describe_kv(answer.timing)
        yield describe_ttft(answer.timing)
    if answer.arrivals_s:
        yield f"TTFT at the client: {answer.arrivals_s[0] * 1e3:.1f} ms"
    gaps = [after - before for before, after in zip(answer.arrivals_s, answer.arrivals_s[1:], strict=False)]
    if gaps:
        yield f"ITL mean {statistics.fmean(gaps) * 1e3:.1f} ms, p99 {percentile(gaps, 0.99) * 1e3:.1f} ms"


def describe_kv(timing: RequestTiming) -> str:
    """Describe the KV transfer from prefill to decode: bytes, pages, time, speed."""
    if timing.kv_bytes is None:
        return "KV moved: none (one server did both halves)"
    text = f"KV moved: {timing.kv_bytes:,} bytes in {timing.kv_pages} pages"
    if timing.kv_transfer_s:
        text += f", {timing.kv_transfer_s * 1e3:.1f} ms, {timing.kv_bytes / timing.kv_transfer_s / 1e9:.2f} GB/s"
    return text


def describe_ttft(timing: RequestTiming) -> str:
    """Describe the servers' share of TTFT, by part."""
    fields = msgspec.structs.asdict(timing)
    step_s = timing.first_decode_step_s
    then = "" if step_s is None else f"; then the first decode step {step_s * 1e3:.1f}"
    known = [(name, fields[field]) for name, field in TTFT_PARTS if fields[field] is not None]
    parts = " + ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in known)
    return f"TTFT in the servers: {sum(seconds for _, seconds in known) * 1e3:.1f} ms = {parts}{then}"


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def converse(client: openai.OpenAI, args: argparse.Namespace) -> None:
    """Ask the first question and report on the answer; then ask each line of stdin, with the conversation so far."""
    model = next(iter(client.models.list())).id
    messages: list[ChatCompletionMessageParam] = []
    question: str | None = args.question
    while question is not None:
        print(f"\n> {question}\n", flush=True)
        messages.append({"role": "user", "content": question})
        answer = ask(client, model, messages, args)
        messages.append({"role": "assistant", "content": answer.text})
        print("\n" + "\n".join(f"  {line}" for line in report(answer)), flush=True)
        question = None if args.once else next_question()


def next_question() -> str | None:
    """Return the next non-empty line of stdin; None at its end."""
    while True:
        try:
            line = input("\nyou (Ctrl-D ends): ").strip()
        except EOFError:
            return None
        if line:
            return line


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, 1 when the service does not start or answers with an error, 130 after Ctrl-C."""
    args, server_flags = parse_flags(argv)
    try:
        with contextlib.ExitStack() as stack:
            base_url = args.base_url or stack.enter_context(local_service(args, server_flags))
            http = openai.DefaultHttpxClient(trust_env=args.base_url is not None)
            client = stack.enter_context(openai.OpenAI(base_url=base_url, api_key=args.api_key, http_client=http))
            converse(client, args)
    except (openai.OpenAIError, ChildError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
