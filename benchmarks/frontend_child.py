"""The API process of a server, or a stand-in for its scheduler, as children of `bench_frontend`.

    python -m benchmarks.frontend_child api --channel DIR --model-path M       prints a line PDSERVE_READY
    python -m benchmarks.frontend_child engine --channel DIR --streams 64 --tokens 512 --rates 5000 0

The API process is the real one. The stand-in waits until as many requests as `--streams` have come, then gives each one
token a step, and prints `DONE seconds`. It does so at the first of `--rates` tokens a second over all of them (0: as
fast as it can), the next time at the second, and so on from the beginning.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Sequence

from pdserve.base.process import ServerReady, announce_ready
from pdserve.config.cli import parse_server_args
from pdserve.config.resolve import resolve
from pdserve.launch_checks import LocalModel
from pdserve.protocol.channel import ChannelAddress, ZmqApiChannel, ZmqSchedulerChannel
from pdserve.protocol.engine_state import EngineReady, EngineState, SchedulerHeartbeat
from pdserve.protocol.messages import (
    EngineCoreOutput,
    FinishReason,
    GenerateRequest,
    OutputBatch,
    Shutdown,
    StateQuery,
    StateReply,
)
from pdserve.server.lifecycle.instance import EngineBackend
from pdserve.server.lifecycle.run import run_api

VOCAB_SIZE, FIRST_WORD = 49152, 1000
READY = EngineReady(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    vocab_size=VOCAB_SIZE,
    context_length=8192,
    max_total_tokens=1 << 20,
    eos_token_ids=[2],
    facts={},
)
STATE = EngineState(
    queues={},
    memory={},
    counters={},
    facts={},
    num_running_reqs=0,
    num_queue_reqs=0,
    num_used_tokens=0,
    max_total_tokens=1 << 20,
)


def serve(channel: str, model: str) -> int:
    """The API process, until a signal."""
    config = resolve(parse_server_args(["--model-path", model, "--port", "0", "--device", "cpu"]))

    def announce(port: int) -> None:
        announce_ready(ServerReady(role="null", url=f"http://127.0.0.1:{port}", bootstrap_port=None))

    backend = EngineBackend(
        config=config,
        open_channel=lambda: ZmqApiChannel(ChannelAddress(channel)),
        engine_died=lambda: None,
        on_ready=announce,
    )
    return run_api(backend, tokenizer_dir=LocalModel.find(config).tokenizer)


class StandIn:
    """A scheduler's end of the channel, with requests that cost nothing."""

    def __init__(self, channel: str, num_tokens: int, rates: Sequence[float]) -> None:
        self._channel = ZmqSchedulerChannel(ChannelAddress(channel))
        self._num_tokens = num_tokens
        self._rates = itertools.cycle(rates)
        self._rng = random.Random(0)

    def run(self, num_streams: int) -> None:
        """Rounds of `num_streams` requests until the API process says that it ends."""
        self._channel.send(READY)
        waiting: list[GenerateRequest] = []
        while True:
            message = self._channel.recv(0.5)
            match message:
                case None:
                    self._channel.beat(SchedulerHeartbeat(dp_rank=0, turn_s=None, num_turns=0))
                case GenerateRequest():
                    waiting.append(message)
                    if len(waiting) == num_streams:
                        print(f"DONE {self._answer(waiting)}", flush=True)
                        waiting = []
                case StateQuery():
                    self._channel.send(StateReply(query_id=message.query_id, state=STATE))
                case Shutdown():
                    return
                case _:
                    pass

    def _answer(self, requests: list[GenerateRequest]) -> float:
        """One token each, step by step; seconds."""
        rate = next(self._rates)
        step_s = len(requests) / rate if rate else 0.0
        began = time.monotonic()
        for step in range(self._num_tokens):
            last = step == self._num_tokens - 1
            finish = FinishReason(type="length", length=self._num_tokens) if last else None
            outputs = [
                EngineCoreOutput(
                    rid=request.rid,
                    token_ids=[self._rng.randrange(FIRST_WORD, VOCAB_SIZE)],
                    finish=finish,
                    prompt_tokens=len(request.input_ids),
                )
                for request in requests
            ]
            self._channel.send(OutputBatch(outputs=outputs))
            time.sleep(max(0.0, began + (step + 1) * step_s - time.monotonic()))
        return time.monotonic() - began


def main() -> int:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("api", "engine"))
    parser.add_argument("--channel", required=True)
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rates", type=float, nargs="+", default=[5000.0])
    args = parser.parse_args()
    if args.part == "api":
        return serve(args.channel, args.model_path)
    StandIn(args.channel, args.tokens, args.rates).run(args.streams)
    return 0


if __name__ == "__main__":
    sys.exit(main())
