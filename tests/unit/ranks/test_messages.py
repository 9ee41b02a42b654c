"""What ranks say to each other, on the wire."""

from __future__ import annotations

import pytest

from pdserve.errors import ConfigError, ModelError, ProtocolError, RankError
from pdserve.executor.interface import SampledToken, StepResult
from pdserve.protocol.failure import Failure
from pdserve.protocol.logprobs import PromptLogprobs
from pdserve.protocol.messages import GenerateRequest, PauseGeneration, Shutdown
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.ranks.messages import (
    Answer,
    Begin,
    Launched,
    PartialTick,
    RankReady,
    StepEnded,
    Stop,
    Tick,
    TransferStart,
    Trouble,
    follower_codec,
    leader_codec,
)
from pdserve.transfer.checksum import GroupDigest, RankDigest
from pdserve.transfer.events import (
    CopyDone,
    FrameArrived,
    Notified,
    PeerConnected,
    PeerGone,
    PeerListens,
    PrefillFound,
    PrefillNotFound,
)
from pdserve.transfer.wire import MemoryKey, RankMemory, WireRegion

MEMORY = RankMemory("h:1", (WireRegion(1, 2),))
FAILURE = Failure(code="c", message="m")


def test_what_is_said_comes_out_as_it_went_in() -> None:
    sampling = CoreSamplingParams(seed=(1 << 63) - 1, logit_bias={5: 0.5}, stop_token_ids=(1,))
    digest = RankDigest(1, (GroupDigest("kv", (0, 2), (0, 1), ("k", "v"), b"1234", b"5678"),))
    token = SampledToken(7, -0.5, ((7, -0.5), (8, -1.0)), (0.25,))
    prompts = {1: PromptLogprobs(start=3, own=b"1234", ranks=b"5678")}
    for message in (
        Tick(
            1.5,
            (
                GenerateRequest(rid="r", input_ids=[1, 2], sampling=sampling),
                PauseGeneration(query_id="q", mode="retract"),
                FrameArrived(b"frame"),
                PrefillFound(("h", 1), (("instance", "h:2"),)),
                PrefillNotFound(("h", 1), FAILURE),
                PeerGone("instance"),
                PeerListens("instance"),
                Shutdown(),
            ),
            2,
            7,
        ),
        PartialTick((FrameArrived(b"frame"),)),
        Launched(9, -(1 << 62)),
        StepEnded(2.5, StepResult(9, (token, None), prompts, (1,))),
        Answer(True),
        Answer(b"slot"),
        Answer((digest, digest)),
        Begin(
            now=0.5,
            rebalances=True,
            transfer=TransferStart(
                instance="i",
                endpoint="h:1",
                handshake={"a": 1, "b": "c"},
                ranks=(MEMORY,),
                drain_timeout_s=1.5,
                fence_drain_timeout_s=2.5,
                secret="s",
            ),
        ),
        Stop(),
        Stop(Trouble(kind="config", message="m", field="f")),
    ):
        assert follower_codec().decode(follower_codec().encode(message)) == message
    for report in (
        RankReady(
            facts={"model": "m"},
            memory=MEMORY,
            samples={"w": {0: 0.1, 1 << 40: -2.0}},
            drain_timeout_s=1.5,
            fence_drain_timeout_s=2.5,
        ),
        CopyDone(MemoryKey(1, 2, "o"), 3, FAILURE, False, 0.25),
        Notified(MemoryKey(1, 2, "o"), 4, 1),
        PeerConnected("h:1", FAILURE, 2),
    ):
        assert leader_codec().decode(leader_codec().encode(report)) == report


def test_what_a_leader_says_no_follower_does() -> None:
    with pytest.raises(ProtocolError):
        leader_codec().decode(follower_codec().encode(Stop()))


@pytest.mark.parametrize("error", [ConfigError("a", field="b"), ModelError("c"), RankError("d")])
def test_an_error_crosses_as_what_it_is(error: ConfigError | ModelError | RankError) -> None:
    again = Trouble.of(error).error()
    assert type(again) is type(error) and str(again) == str(error)
    assert Trouble.of(KeyError("x")).error().args == ("KeyError: 'x'",)
