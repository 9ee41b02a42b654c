"""A conversation is known by its name or its opening, and its turns go to the same pair of servers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import orjson
import pytest
from multidict import CIMultiDict

from pdserve.http.access import CHAT_PATH, COMPLETIONS_PATH, GENERATE_PATH
from pdserve.router.policies.routing_keys import (
    OPENING_CHARS,
    OPENING_TOKENS,
    ConversationKey,
    conversation_key,
    prompt_of,
)

RunWorld = Callable[[Callable[[Any], Coroutine[Any, Any, None]]], None]


def key(path: str, body: dict[str, Any], **headers: str) -> ConversationKey | None:
    return conversation_key(path, body, CIMultiDict({name.replace("_", "-"): text for name, text in headers.items()}))


def turns(number: int, question: str = "") -> list[dict[str, Any]]:
    """The messages of a conversation at its turn `number`, 1 for the first."""
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": question or "first question"}]
    for turn in range(2, number + 1):
        said += [{"role": "assistant", "content": f"answer {turn}"}, {"role": "user", "content": f"question {turn}"}]
    return said


def test_a_name_counts_before_the_opening_and_headers_before_the_body() -> None:
    body = {"prompt": "x", "user": "u", "prompt_cache_key": "c"}
    assert key(COMPLETIONS_PATH, body, x_smg_routing_key="r", X_Session_Id="s") == ConversationKey(b"r", named=True)
    assert key(COMPLETIONS_PATH, body, x_session_id="s") == ConversationKey(b"s", named=True)
    assert key(COMPLETIONS_PATH, body) == ConversationKey(b"c", named=True)
    assert key(COMPLETIONS_PATH, {"prompt": "x", "user": "u"}) == ConversationKey(b"u", named=True)
    assert key(COMPLETIONS_PATH, {"prompt": "x"}) == ConversationKey(b"x", named=False)


@pytest.mark.parametrize("nameless", ["", None, 5, ["a"], {"a": 1}])
def test_what_is_no_name_is_passed_over(nameless: Any) -> None:
    body = {"prompt": "x", "user": nameless, "prompt_cache_key": nameless}
    assert key(COMPLETIONS_PATH, body, x_session_id="") == ConversationKey(b"x", named=False)


def test_every_turn_of_a_chat_has_the_key_of_its_first() -> None:
    first = key(CHAT_PATH, {"messages": turns(1)})
    assert first is not None and not first.named
    assert {key(CHAT_PATH, {"messages": turns(number)}) for number in (2, 3, 9)} == {first}
    assert key(CHAT_PATH, {"messages": turns(2, "another question")}) != first
    bare = [message for message in turns(3) if message["role"] != "system"]
    assert key(CHAT_PATH, {"messages": bare}) == key(CHAT_PATH, {"messages": bare[:1]})


def test_a_long_system_prompt_does_not_make_all_chats_one() -> None:
    chats = [[{"role": "system", "content": "s" * 5000}, *turns(1, question)[1:]] for question in "ab"]
    assert key(CHAT_PATH, {"messages": chats[0]}) != key(CHAT_PATH, {"messages": chats[1]})


@pytest.mark.parametrize(
    ("path", "field", "prompt", "later"),
    [
        (COMPLETIONS_PATH, "prompt", "p" * OPENING_CHARS, "p" * OPENING_CHARS + " and more"),
        (GENERATE_PATH, "text", "\u4e16" * OPENING_CHARS, "\u4e16" * 900),
        (GENERATE_PATH, "input_ids", [7] * OPENING_TOKENS, [7] * OPENING_TOKENS + [8]),
        (COMPLETIONS_PATH, "prompt", ["short", "b"], ["short", "c", "d"]),
        (GENERATE_PATH, "input_ids", [[1, 2], [3]], [[1, 2], [4]]),
    ],
)
def test_a_prompt_that_goes_on_has_the_key_of_its_beginning(path: str, field: str, prompt: Any, later: Any) -> None:
    first = key(path, {field: prompt})
    assert first is not None and first == key(path, {field: later})
    other = [[9, 9]] if field == "input_ids" else "another"
    assert first != key(path, {field: other})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT_PATH, {}),
        (CHAT_PATH, {"messages": []}),
        (CHAT_PATH, {"messages": "hi"}),
        (CHAT_PATH, {"prompt": "hi"}),
        (COMPLETIONS_PATH, {"prompt": ""}),
        (COMPLETIONS_PATH, {"prompt": 5}),
        (COMPLETIONS_PATH, {"prompt": {"a": 1}}),
        (GENERATE_PATH, {"input_ids": []}),
        (GENERATE_PATH, {"text": None}),
    ],
)
def test_a_body_that_says_nothing_has_no_key(path: str, body: dict[str, Any]) -> None:
    assert key(path, body) is None


@pytest.mark.parametrize("messages", [["hi"], [5, None], [{"role": 7}], [{"content": "x"}], [[]]])
def test_messages_of_no_shape_are_left_to_the_worker(messages: Any) -> None:
    assert key(CHAT_PATH, {"messages": messages}) == ConversationKey(orjson.dumps(messages), named=False)


def test_a_header_that_is_not_utf8_is_a_name_too() -> None:
    found = key(GENERATE_PATH, {"text": "x"}, x_session_id=b"\xff".decode(errors="surrogateescape"))
    assert found is not None and found.named


async def send(world: Any, url: str, number: int, question: str, **headers: str) -> None:
    body = {"model": "m", "messages": turns(number, question)}
    async with world.session.post(url + CHAT_PATH, json=body, headers=headers) as response:
        assert response.status == 200
        await response.read()


def visits(workers: list[Any], question: str) -> list[int]:
    """How often each worker saw the conversation."""
    return [sum(body["messages"][1]["content"] == question for body in worker.bodies) for worker in workers]


def test_all_turns_reach_one_pair_and_conversations_use_every_worker(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefills = [await world.worker(f"p{i}") for i in range(2)]
        decodes = [await world.worker(f"d{i}") for i in range(3)]
        questions = [f"question of chat {i}" for i in range(40)]
        async with world.router(prefills, decodes, policy="consistent_hashing") as url:
            for number in (1, 2, 3):
                for question in questions:
                    await send(world, url, number, question)
        for group in (prefills, decodes):
            seen = [visits(group, question) for question in questions]
            assert all(sorted(counts) == [0] * (len(group) - 1) + [3] for counts in seen), seen
            assert all(worker.bodies for worker in group)

    run_world(scenario)


def test_a_conversation_moves_when_its_worker_dies_and_the_others_stay(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill = await world.worker("p")
        decodes = [await world.worker(f"d{i}") for i in range(3)]
        questions = [f"question of chat {i}" for i in range(30)]
        async with world.router([prefill], decodes, policy="consistent_hashing") as url:
            for question in questions:
                await send(world, url, 1, question)
            homes = {question: visits(decodes, question).index(1) for question in questions}
            await decodes[0].stop()
            for question in questions:
                await send(world, url, 2, question)
        for question, home in homes.items():
            counts = visits(decodes, question)
            if home == 0:
                assert sorted(counts[1:]) == [0, 1], "its second turn went to another"
            else:
                assert counts[home] == 2, "nothing moved it"

    run_world(scenario)


def test_a_named_conversation_stays_though_its_prompts_differ(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill = await world.worker("p")
        decodes = [await world.worker(f"d{i}") for i in range(4)]
        async with world.router([prefill], decodes, policy="consistent_hashing") as url:
            for index in range(12):
                await send(world, url, 1, f"question {index}", **{"X-SMG-Routing-Key": "mine"})
        assert sorted(len(decode.bodies) for decode in decodes) == [0, 0, 0, 12]

    run_world(scenario)


def test_prompts_and_openings_of_other_salts_differ() -> None:
    bodies: list[dict[str, Any]] = [
        {}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"extra_key": "a"}, {"cache_salt": "a", "extra_key": "b"},
    ]  # fmt: skip
    for path, body in ((COMPLETIONS_PATH, {"prompt": "x" * 300}), (CHAT_PATH, {"messages": turns(2)})):
        prompts = [prompt_of(path, body | salt) or "" for salt in bodies]
        assert len({prompt[:6] for prompt in prompts}) == len(bodies), "no common prefix with another salt"
        assert len({key(path, body | salt) for salt in bodies}) == len(bodies)
        assert prompts[1] == prompt_of(path, body | {"cache_salt": ["a", None]})
    assert prompt_of(COMPLETIONS_PATH, {"cache_salt": "a"}) is None
