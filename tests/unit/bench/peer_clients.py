"""The request functions of other benchmark clients, and ours, on streams whose times are given. No network, no clock.

Run by the Python of the other client: `python peer_clients.py vllm|sglang < cases.json` prints what it measured. The
script imports nothing of pdserve, which that Python does not have.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import types
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

Json = dict[str, Any]
BROKEN = "broken connection"
"""In the place of the text of a chunk: the connection breaks there."""


class ScriptedClock:
    """A clock that the chunks of a stream move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class ScriptedStream:
    """A 200 answer, and the session that gets it for each request. Its chunks are pairs of seconds and text."""

    status, reason = 200, "OK"

    def __init__(self, chunks: list[tuple[float, str]], clock: ScriptedClock) -> None:
        self.content = self
        self._chunks, self._clock = chunks, clock

    def post(self, *args: Any, **kwargs: Any) -> ScriptedStream:
        return self

    async def __aenter__(self) -> ScriptedStream:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Leave everything as it is."""

    async def iter_any(self) -> AsyncIterator[bytes]:
        """Yield the chunks as they arrive."""
        for seconds, text in self._chunks:
            self._clock.now += seconds
            if text == BROKEN:
                raise aiohttp.ClientPayloadError(BROKEN)
            yield text.encode()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self.iter_any():
            for line in chunk.splitlines(keepends=True):
                yield line


class AnyFlags:
    """Flags of SGLang's bench_serving that this script does not use."""

    top_p, temperature, top_logprobs_num = 1.0, 0.0, 0

    def __getattr__(self, name: str) -> None:
        return None


def vllm_measured(case: Json, clock: ScriptedClock, stream: ScriptedStream) -> Any:
    """Return what `vllm bench serve` takes of a stream; only the file of its request functions is loaded."""
    package = importlib.util.find_spec("vllm")
    assert package is not None and package.submodule_search_locations
    path = Path(package.submodule_search_locations[0]) / "benchmarks/lib/endpoint_request_func.py"
    spec = importlib.util.spec_from_file_location("vllm_request_functions", path)
    assert spec is not None and spec.loader is not None
    module = types.ModuleType(spec.name)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.time = types.SimpleNamespace(perf_counter=clock)  # type: ignore[attr-defined]
    kind = "chat_completions" if case["chat"] else "completions"
    asked = module.RequestFuncInput(
        prompt="a", api_url=f"http://a/v1/{kind.replace('_', '/')}", prompt_len=1, output_len=case["output_len"],
        model="m",
    )  # fmt: skip
    return asyncio.run(getattr(module, f"async_request_openai_{kind}")(asked, stream))


def sglang_measured(case: Json, clock: ScriptedClock, stream: ScriptedStream) -> Any:
    """Return what SGLang's bench_serving takes of a stream."""
    from sglang.benchmark import serving  # type: ignore[import-not-found]

    serving.time = types.SimpleNamespace(perf_counter=clock, time=clock)
    serving.set_global_args(AnyFlags())
    serving._create_bench_client_session = lambda: stream
    kind = "chat_completions" if case["chat"] else "completions"
    asked = serving.RequestFuncInput(
        prompt="a", api_url=f"http://a/v1/{kind.replace('_', '/')}", prompt_len=1, output_len=case["output_len"],
        model="m", lora_name="", image_data=None, extra_request_body={},
    )  # fmt: skip
    return asyncio.run(getattr(serving, f"async_request_openai_{kind}")(asked))


def main() -> None:
    """Print a list with what one client measured of each case."""
    measure = {"vllm": vllm_measured, "sglang": sglang_measured}[sys.argv[1]]
    found = []
    for case in json.load(sys.stdin):
        clock = ScriptedClock()
        output = measure(case, clock, ScriptedStream(case["chunks"], clock))
        tokens = output.output_tokens if sys.argv[1] == "vllm" else output.output_len
        found.append(
            {"success": output.success, "ttft": output.ttft, "itl": output.itl, "e2el": output.latency,
             "tokens": tokens}
        )  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
