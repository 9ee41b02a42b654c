"""The configuration of an engine that serves an `LLM`."""

from __future__ import annotations

from pdserve.config.cli import parse_server_args
from pdserve.config.resolve import Machine, fill_in
from pdserve.launch_offline import without_streams


def test_no_step_is_made_small_for_streams_unless_that_is_asked_for() -> None:
    for words, size in (("", None), ("--mixed-chunk-size 100", 100), ("--chunked-prefill-size 64", None)):
        given = parse_server_args(["--model-path", "m", *words.split()])
        resolved, _ = fill_in(given, Machine(has_cuda=False, num_cores=2))
        found = without_streams(given, resolved)
        assert found.schedule.mixed_chunk_size == size
        assert found.schedule.chunked_prefill_size == resolved.schedule.chunked_prefill_size


def test_prompts_are_computed_together_unless_that_is_asked_for() -> None:
    for words, tokens in (("", -1), ("--prefill-saturation-tokens 100", 100)):
        given = parse_server_args(["--model-path", "m", *words.split()])
        resolved, _ = fill_in(given, Machine(has_cuda=False, num_cores=2))
        assert without_streams(given, resolved).schedule.prefill_saturation_tokens == tokens
