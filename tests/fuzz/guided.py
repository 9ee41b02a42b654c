"""The same targets guided by coverage, with atheris (libFuzzer). Imported only where `--guided` asks for it.

atheris is not among the test requirements: `pip install atheris` (wheels for CPython 3.11 to 3.13 on Linux).
libFuzzer ends the process itself; an input that fails is written into the working directory as `crash-...`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.fuzz.watch import Growth, LoopWatch

MAX_INPUT = 4096
TIMEOUT_S = 20
RSS_LIMIT_MB = 4096
FRAMES_AN_EPISODE = 2000
FILES_WARM_UP = 500
MAX_GROWTH_MB = 256.0
"""More than the unguided targets may: libFuzzer keeps its corpus in this process."""


def run_guided(what: str, count: int, seed: int, corpus: Path | None) -> None:
    """Fuzz the target `what` for `count` inputs. Does not return."""
    import atheris

    with contextlib.ExitStack() as stack:
        with atheris.instrument_imports(include=["pdserve", "gguf"]):
            opened = {"frames": frames, "http": http, "files": files}[what](seed)
            target, first = stack.enter_context(opened)
        folder = corpus or Path(tempfile.mkdtemp(prefix="pdserve-corpus-"))
        folder.mkdir(parents=True, exist_ok=True)
        for index, data in enumerate(first):
            (folder / f"seed-{index}").write_bytes(data)
        argv = [sys.argv[0], str(folder), f"-runs={count}", f"-seed={seed}", f"-max_len={MAX_INPUT}"]
        atheris.Setup([*argv, f"-timeout={TIMEOUT_S}", f"-rss_limit_mb={RSS_LIMIT_MB}"], target)
        atheris.Fuzz()


Target = tuple[Callable[[bytes], None], list[bytes]]
"""What takes an input, and first inputs."""


@contextlib.contextmanager
def frames(seed: int) -> Iterator[Target]:
    """Inputs are packets before they are sealed."""
    import msgspec

    from pdserve.protocol.codec import PROTOCOL_VERSION, Seal
    from pdserve.transfer.events import FrameArrived
    from tests.fuzz.frames import MAX_HANDLE_S, Episode
    from tests.unit.transfer.kit import TOKEN

    rng, seal = random.Random(seed), Seal(TOKEN)
    state: dict[str, Any] = {"episode": Episode(rng), "left": FRAMES_AN_EPISODE}
    growth = Growth(MAX_GROWTH_MB, FRAMES_AN_EPISODE)

    def one(data: bytes) -> None:
        if not state["left"]:
            state.update(episode=Episode(rng), left=FRAMES_AN_EPISODE)
        state["left"] -= 1
        episode = state["episode"]
        to = episode.decode if data[:1] < b"\x80" else episode.prefill
        frame = seal.close(bytes([PROTOCOL_VERSION]) + data[1:])
        began = time.perf_counter()
        to.kv.handle(FrameArrived(frame))
        took = time.perf_counter() - began
        assert took < MAX_HANDLE_S, f"{took:.1f} s for one frame"
        if rng.random() < 0.1:
            episode.happen()
        episode.drain()
        growth.look()

    sides = ((b"\x00", state["episode"].decode), (b"\xff", state["episode"].prefill))
    first = [mark + msgspec.msgpack.encode(state["episode"].packet(side)) for mark, side in sides for _ in range(100)]
    yield one, first


@contextlib.contextmanager
def http(seed: int) -> Iterator[Target]:
    """Inputs are the number of a path, as one byte, and a body."""
    from tests.fuzz.http import MAX_STALL_S, SEEDS, WARM_UP, HttpReport, post
    from tests.unit.server.server_kit import Bench, bench, tiny_tokenizer

    paths = sorted({path for path, _ in SEEDS} - {"/pause_generation"})
    growth = Growth(MAX_GROWTH_MB, WARM_UP)

    async def watched(server: Bench, path: str, body: bytes) -> None:
        async with LoopWatch() as watch:
            await post(server, path, body, HttpReport())
        assert watch.worst_s < MAX_STALL_S, f"the loop stood still for {watch.worst_s:.1f} s: {path} {body!r}"

    first = [bytes([paths.index(p)]) + json.dumps(body).encode() for p, body in SEEDS if p in paths]
    with asyncio.Runner() as runner:
        opened = bench(tiny_tokenizer())
        server = runner.run(opened.__aenter__())

        def one(data: bytes) -> None:
            path = paths[data[0] % len(paths)] if data else paths[0]
            runner.run(watched(server, path, data[1:]))
            server.scheduler.requests.clear()
            growth.look()

        try:
            yield one, first
        finally:
            runner.run(opened.__aexit__(None, None, None))


@contextlib.contextmanager
def files(seed: int) -> Iterator[Target]:
    """Inputs are the number of a kind of file, as one byte, and its header. Files are read in this process."""
    from pdserve.errors import ConfigError, ModelError
    from tests.fuzz.files import KINDS, MAX_CASE_S, limit_memory, make_sound, read_case, sound_header, with_header
    from tests.unit.model.test_config import BASE, MOE

    growth = Growth(MAX_GROWTH_MB, FILES_WARM_UP)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-fuzz-")))
        make_sound(folder / "sound")
        headers = [bytes([number]) + sound_header(folder, kind) for number, kind in enumerate(KINDS)]
        for data in headers:
            read_case(with_header(folder, KINDS[data[0]], data[1:]), KINDS[data[0]])  # imports, too
        stack.callback(resource.setrlimit, resource.RLIMIT_AS, limit_memory())

        def one(data: bytes) -> None:
            kind = KINDS[data[0] % len(KINDS)] if data else KINDS[0]
            path = with_header(folder, kind, data[1:])
            began = time.perf_counter()
            with contextlib.suppress(ConfigError, ModelError):
                read_case(path, kind)
            took = time.perf_counter() - began
            assert took < MAX_CASE_S, f"{took:.1f} s for one file"
            growth.look()

        scaled = BASE | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0}}
        yield one, headers + [b"\0" + json.dumps(config).encode() for config in (BASE, BASE | MOE, scaled)]
