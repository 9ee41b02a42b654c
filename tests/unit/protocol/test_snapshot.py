"""Snapshots as bytes: what is encoded is decoded, and everything else is refused by the name of what is wrong."""

from __future__ import annotations

import random
import struct

import msgspec
import pytest

from pdserve.errors import RequestError
from pdserve.protocol.logprobs import Logprobs, PromptLogprobs
from pdserve.protocol.messages import TokenLogprob
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.protocol.snapshot import (
    KVIdentity,
    RequestSnapshot,
    SnapshotGroup,
    SnapshotKV,
    SnapshotOrigin,
    decode,
    encode,
)
from tests.fuzz.structs import sample

IDENTITY = KVIdentity(weights="w", layout="l", dtype="float32", page_tokens=4)
PLAIN = RequestSnapshot(
    rid="r",
    model="m",
    identity=IDENTITY,
    input_ids=[1, 2, 3],
    output_ids=[4, 5],
    sampling=CoreSamplingParams(max_new_tokens=8, seed=7),
)


def with_(**fields: object) -> RequestSnapshot:
    return msgspec.structs.replace(PLAIN, **fields)


def refused(data: bytes) -> str:
    with pytest.raises(RequestError) as caught:
        decode(data)
    assert caught.value.status == 400 and caught.value.code == "bad_snapshot"
    return caught.value.field or ""


def test_a_snapshot_is_read_as_it_was_written() -> None:
    origin = SnapshotOrigin(path="/generate", body=b'{"text":"a"}', stream_id="s", created=3)
    kv = SnapshotKV(
        num_tokens=4, groups=(SnapshotGroup(num_pages=2, page_bytes=3), SnapshotGroup(num_pages=1, page_bytes=4))
    )
    whole = with_(
        logprobs=Logprobs(top=1),
        output_logprobs=[TokenLogprob(-0.5, [(4, -0.5)]), TokenLogprob(-1.0, [(5, -1.0)])],
        origin=origin,
        kv=kv,
        lora="a",
        cache_salt="s\0k",
    )
    snapshot, data = decode(encode(whole, [b"abcdef", b"ghij"]))
    assert snapshot == whole
    assert [bytes(part) for part in kv.split(data)] == [b"abcdef", b"ghij"]
    assert decode(encode(PLAIN)) == (PLAIN, b"")


def test_every_damage_is_named() -> None:
    data = encode(PLAIN)
    assert refused(b"") == refused(data[:20]) == refused(data[:-1]) == refused(data + b"x") == "snapshot.length"
    assert refused(b"X" + data[1:]) == "snapshot.magic"
    assert refused(data[:6] + struct.pack("<H", 2) + data[8:]) == "snapshot.version"
    assert refused(data[:8] + struct.pack("<Q", 1 << 60) + data[16:]) == "snapshot.length"
    assert refused(data[:-1] + bytes([data[-1] ^ 1])) == "snapshot.checksum"
    rng = random.Random(0)
    for _ in range(300):
        at = rng.randrange(len(data))
        refused(data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :])


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("rid", {"rid": ""}),
        ("rid", {"rid": "r" * 257}),
        ("input_ids", {"input_ids": []}),
        ("input_ids[0]", {"input_ids": [-1]}),
        ("output_ids[0]", {"output_ids": [1 << 31]}),
        ("output_ids", {"output_ids": [1] * 8}),
        ("output_logprobs", {"logprobs": Logprobs()}),
        ("output_logprobs", {"output_logprobs": [TokenLogprob(0.0)]}),
        ("output_logprobs", {"logprobs": Logprobs(), "output_logprobs": [TokenLogprob(0.0, [(1, 0.0)] * 129)] * 2}),
        ("prompt_logprobs", {"prompt_logprobs": [PromptLogprobs(start=1, own=b"aaaa", ranks=b"aaaa")]}),
        (
            "prompt_logprobs",
            {"logprobs": Logprobs(output=False), "prompt_logprobs": [PromptLogprobs(start=1, own=b"a", ranks=b"a")]},
        ),
        (
            "prompt_logprobs",
            {
                "logprobs": Logprobs(output=False),
                "prompt_logprobs": [PromptLogprobs(start=3, own=b"aaaa", ranks=b"aaaa")],
            },
        ),
        ("kv.num_tokens", {"kv": SnapshotKV(num_tokens=5, groups=())}),
        ("kv.num_tokens", {"kv": SnapshotKV(num_tokens=0, groups=())}),
        ("kv.groups", {"kv": SnapshotKV(num_tokens=1, groups=(SnapshotGroup(num_pages=0, page_bytes=0),) * 65)}),
    ],
)
def test_values_that_do_not_fit_are_named(field: str, fields: dict[str, object]) -> None:
    assert refused(encode(with_(**fields))) == f"snapshot.{field}"


def test_kv_of_another_size_than_named_is_refused() -> None:
    """The sizes are compared before any memory is taken."""
    kv = SnapshotKV(num_tokens=1, groups=(SnapshotGroup(num_pages=1, page_bytes=4),))
    data = bytearray(encode(with_(kv=kv), [b"1234"]))
    struct.pack_into("<Q", data, 16, 1 << 40)
    assert refused(bytes(data)) == "snapshot.length"


def test_no_value_breaks_the_reader() -> None:
    rng = random.Random(1)
    taken, fields = 0, set[str]()
    for _ in range(400):
        made = sample(RequestSnapshot, rng, {"kv": None})
        try:
            assert decode(encode(made))[0].rid == made.rid
            taken += 1
        except RequestError as error:
            fields.add(error.field or "")
    assert taken and all(field.startswith("snapshot.") for field in fields)
