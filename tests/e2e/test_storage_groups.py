"""Models with recurrent layers or windows share a store: one server has computed a prompt, another one reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import assert_idle, generate_all, running_monolith, running_pair, until
from tests.e2e.test_storage import body, outputs, prompts_of, storage_flags, until_stored

ALONE = (
    *("--dtype", "float32", "--page-size", "16", "--model-impl", "native", "--chunked-prefill-size", "64"),
    *("--max-total-tokens", "4096"),
)
TIER = ("--enable-hierarchical-cache", "--hicache-ratio", "2")
OFFLOAD = ("--disaggregation-decode-enable-offload-kvcache",)
Checkpoint = Callable[[str], Path]


def counts_files(directory: Path, space: str) -> int:
    """Objects of a page space in a directory."""
    return len(list(directory.rglob(f"*-{space}-*.kv")))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(), ("--tp-size", "2")], ids=["one rank", "tp 2"])
@pytest.mark.parametrize("name", ["qwen3_5", "gemma3_text"])
def test_another_server_reads_what_one_has_computed(
    family_checkpoint: Checkpoint, tmp_path: Path, name: str, shape: tuple[str, ...]
) -> None:
    """State and window pages are read with the token pages before them; without them the prompt is computed."""
    model, prompts = str(family_checkpoint(name)), prompts_of(11, 3)
    flags = (*ALONE, *TIER, *shape, *storage_flags("file", "wait_complete", directory=str(tmp_path)))
    space = "state" if name == "qwen3_5" else "window"
    with running_monolith(model, *ALONE, *shape) as alone:
        expected = outputs(alone.url, prompts)
    with running_monolith(model, *flags) as server:
        assert outputs(server.url, prompts) == expected
        until_stored(server, 3 * 192)
        until(lambda: counts_files(tmp_path, space) > 0, 20.0, "states or window pages are stored")
        assert_idle(server)
    with running_monolith(model, *flags) as server:
        assert outputs(server.url, prompts) == expected
        assert server.counter("prefetched_tokens") == server.counter("cached_tokens") == 3 * 192
        assert_idle(server)
    for path in tmp_path.rglob(f"*-{space}-*.kv"):
        path.unlink()
    with running_monolith(model, *flags) as server:
        assert outputs(server.url, prompts) == expected
        assert server.counter("cached_tokens") == 0, "token pages alone are not used"
        assert_idle(server)


@pytest.mark.slow
def test_the_next_turn_after_a_pair_whose_decode_server_stores(family_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Prefill stores states, decode the pages of what it generates; another server, and another pair, go on."""
    model, prompt = str(family_checkpoint("qwen3_5")), prompts_of(12, 1)[0]
    store = storage_flags("file", "wait_complete", directory=str(tmp_path))
    with running_pair(model, *ALONE, *store, prefill_flags=TIER, decode_flags=OFFLOAD) as pair:
        first = pair.generate(**body(prompt, 100))["output_ids"]
        until(lambda: pair.decode.counter("backuped_tokens") >= 288, 20.0, "decode has stored the turn")
        until(lambda: counts_files(tmp_path, "state") > 0, 20.0, "prefill has stored a state")
        assert_idle(*pair.workers)
    turn = body([*prompt, *first, 7, 8, 9])
    with running_monolith(model, *ALONE) as alone:
        expected = generate_all(alone.url, [turn])[0]["output_ids"]
    with running_monolith(model, *ALONE, *TIER, *store) as server:
        answer = generate_all(server.url, [turn])[0]
        assert answer["output_ids"] == expected
        assert answer["meta_info"]["cached_tokens"] == 192, "up to prefill's last state"
        assert_idle(server)
    with running_pair(model, *ALONE, *store, prefill_flags=TIER, decode_flags=OFFLOAD) as pair:
        assert pair.generate(**turn)["output_ids"] == expected
        assert pair.decode.counter("prefetched_tokens") >= 288, "decode reads token pages; the state is prefill's"
        assert pair.prefill.counter("prefetched_tokens") >= 192
        assert_idle(*pair.workers)
