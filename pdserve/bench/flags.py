"""Flags of `pdserve bench`, with the names of `vllm bench serve` where it has them, and their checks."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pdserve.base.hosts import without_credentials
from pdserve.bench.campaign import LoadPoint
from pdserve.bench.client import ENDPOINTS, BenchTarget, backend_of
from pdserve.bench.datasets import MAKERS, DatasetOptions
from pdserve.bench.metrics import METRICS, PERCENTILES, SLO_METRICS, Slo
from pdserve.bench.prompts import DEFAULT_VOCAB_SIZE, FIRST_ID, PROMPT_TYPES, PromptMaker, open_tokenizer
from pdserve.errors import ConfigError
from pdserve.http.credentials import API_KEY

DEFAULT_URL = "http://127.0.0.1:8000"
BACKGROUND_INPUT_LEN, BACKGROUND_OUTPUT_LEN = 4096, 16


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags."""
    _add_service(parser)
    _add_load(parser)
    _add_datasets(parser)
    _add_results(parser)


def _add_service(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--base-url", default=DEFAULT_URL, metavar="URL", help=f"the service, with or without /v1 ({DEFAULT_URL})")
    add("--backend", choices=tuple(ENDPOINTS), help="form of the requests; by default that of --endpoint")
    add("--endpoint", metavar="PATH", help=f"path of the requests ({', '.join(ENDPOINTS.values())})")
    add("--model", help="name in the requests; the first model of /v1/models when absent")
    add("--api-key", metavar="KEY", help=f"key of the service (or in {API_KEY}, OPENAI_API_KEY)")
    add("--header", nargs="+", default=[], metavar="NAME=VALUE", help="further headers of each request")
    add("--extra-body", metavar="JSON", help="object whose fields each request has, too")
    add("--insecure", action="store_true", help="accept any certificate of an https service")
    add("--compare", metavar="URL", help="a second service, which gets the same requests, in turn with the first")
    add("--compare-label", help="name of the second service in the results; by default its host and port")
    add("--temperature", type=float, default=0.0, help="sampling temperature (0)")
    add("--top-p", type=float, help="nucleus sampling; not sent when absent")
    add("--top-k", type=int, help="most likely tokens to choose from; not sent when absent")
    add("--ignore-eos", action="store_true", help="each answer has the whole output length")
    add("--request-timeout", type=float, default=600.0, metavar="S", help="seconds for one request (600)")
    add("--ready-check-timeout-sec", type=float, default=0.0, metavar="S", help="seconds to wait for the service (0)")


def _add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--num-prompts", type=int, default=100, metavar="N", help="requests of a run (100)")
    add("--num-warmups", type=int, default=1, metavar="N", help="requests before the first run of a service (1)")
    add("--request-rate", type=float, nargs="+", default=[math.inf], metavar="R",
        help="requests per second; several: a run each; inf: all at once (inf)")  # fmt: skip
    add("--prompts-per-concurrency", type=int, metavar="N",
        help="requests of a run for each of --max-concurrency, in the place of --num-prompts")  # fmt: skip
    add("--burstiness", type=float, default=1.0, metavar="B",
        help="shape of the gaps between requests (1); 1: Poisson, below: bursts, above: more even")  # fmt: skip
    add("--max-concurrency", type=int, nargs="+", metavar="N", help="requests in flight at most; several: a run each")
    add("--num-rounds", type=int, default=1, metavar="N", help="times that each run is repeated (1)")
    add("--duration", type=float, metavar="S", help="seconds of a run; requests that run then are cut")
    add("--warmup-duration", type=float, default=0.0, metavar="S",
        help="seconds at the start of a run that do not count (0); background requests begin after them")  # fmt: skip
    add("--background-concurrency", type=int, nargs="+", metavar="N",
        help="clients that send background requests, each one at a time; several: a run each")  # fmt: skip
    add("--background-input-len", type=int, metavar="N",
        help=f"tokens of a background prompt ({BACKGROUND_INPUT_LEN})")  # fmt: skip
    add("--background-output-len", type=int, metavar="N",
        help=f"tokens of its answer ({BACKGROUND_OUTPUT_LEN})")  # fmt: skip
    add("--seed", type=int, default=0, help="seed of prompts and times (0); each run of a sweep has prompts of its own")


def _add_datasets(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--dataset-name", choices=tuple(MAKERS), default="random", help="where the prompts come from (random)")
    add("--dataset-path", type=Path, metavar="FILE", help="JSON lines of mooncake, custom and conversations")
    add("--tokenizer", metavar="MODEL", help="directory, file or model; when absent --model if it is a directory")
    add("--prompt-type", choices=PROMPT_TYPES, help="prompts as token ids or text; by default ids, for chat text")
    add("--vocab-size", type=int, default=DEFAULT_VOCAB_SIZE, metavar="N",
        help=f"without a tokenizer, ids are below this ({DEFAULT_VOCAB_SIZE})")  # fmt: skip
    add("--random-input-len", "--input-len", type=int, default=1024, metavar="N", help="tokens of a prompt (1024)")
    add("--random-output-len", "--output-len", type=int, default=128, metavar="N", help="tokens of an answer (128)")
    add("--random-range-ratio", type=float, default=0.0, metavar="R",
        help="lengths are from (1 - R) to (1 + R) times those (0)")  # fmt: skip
    add("--random-prefix-len", type=int, default=0, metavar="N", help="tokens that all prompts begin with (0)")
    add("--prefix-repetition-prefix-len", type=int, default=256, metavar="N", help="tokens of a shared prefix (256)")
    add("--prefix-repetition-suffix-len", type=int, default=256, metavar="N", help="tokens behind it (256)")
    add("--prefix-repetition-num-prefixes", type=int, default=10, metavar="N", help="different prefixes (10)")
    add("--prefix-repetition-output-len", type=int, default=128, metavar="N", help="tokens of an answer (128)")
    add("--conversation-turns", type=int, default=4, metavar="N", help="turns of a conversation that is made up (4)")
    add("--conversation-pause", type=float, default=0.0, metavar="S", help="seconds between answer and next turn (0)")
    add("--custom-output-len", type=int, metavar="N", help="tokens of each answer; by default those of the file")
    add("--mooncake-slowdown-factor", type=float, default=1.0, metavar="F",
        help="times of a file, times this (1); below 1 is a higher rate")  # fmt: skip
    add("--length-scale", type=float, default=1.0, metavar="F", help="lengths of a trace, times this (1)")


def _add_results(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--goodput", nargs="+", default=[], metavar="METRIC:MS", help=f"limits: {', '.join(SLO_METRICS)} and ms")
    add("--search-goodput", action="store_true",
        help="search the highest rate that keeps --goodput-target; begins at --request-rate, or 1")  # fmt: skip
    add("--goodput-target", type=float, default=0.9, metavar="SHARE", help="share of requests within limits (0.9)")
    add("--percentile-metrics", default=",".join(METRICS), metavar="LIST", help=f"of {','.join(METRICS)} (all)")
    add("--metric-percentiles", default=",".join(f"{one:g}" for one in PERCENTILES), metavar="LIST",
        help="percentiles of each metric (50,90,95,99)")  # fmt: skip
    add("--label", help="name of the service in the results; by default its backend, with --compare host and port")
    add("--metadata", nargs="+", default=[], metavar="KEY=VALUE", help="further fields of the results")
    add("--output-json", type=Path, metavar="FILE", help="write all runs to one file")
    add("--output-html", type=Path, metavar="FILE", help="write a report with charts, in one file without scripts")
    add("--output-png", type=Path, metavar="FILE", help="write the charts as an image (pip install 'pdserve[bench]')")
    add("--save-result", action="store_true", help="write a file for each run, with the fields of vllm bench serve")
    add("--save-detailed", action="store_true", help="the results have the values of each request")
    add("--result-dir", type=Path, metavar="DIR", help="where --save-result writes (.)")
    add("--disable-tqdm", action="store_true", help="no progress on stderr")


def check(args: argparse.Namespace) -> None:
    """Raise ConfigError naming the first flag that is wrong."""
    for name in ("num_prompts", "random_input_len", "random_output_len", "conversation_turns", "num_rounds",
                 "prefix_repetition_prefix_len", "prefix_repetition_suffix_len", "prefix_repetition_num_prefixes",
                 "prefix_repetition_output_len"):  # fmt: skip
        _require(getattr(args, name) >= 1, name, "must be at least 1")
    for name in ("num_warmups", "random_prefix_len", "conversation_pause", "temperature", "ready_check_timeout_sec",
                 "warmup_duration"):  # fmt: skip
        _require(0 <= getattr(args, name) < math.inf, name, "must be at least 0")
    for name in ("burstiness", "mooncake_slowdown_factor", "length_scale", "request_timeout"):
        _require(0 < getattr(args, name) < math.inf, name, "must be above 0")
    _check_load(args)
    _require(all(rate > 0 for rate in args.request_rate), "request_rate", "must be above 0, or inf")
    _require(all(one >= 1 for one in args.max_concurrency or []), "max_concurrency", "must be at least 1")
    _require(0 <= args.random_range_ratio < 1, "random_range_ratio", "must be at least 0 and below 1")
    _require(args.vocab_size > FIRST_ID, "vocab_size", f"must be above {FIRST_ID}")
    _require(0 < args.goodput_target <= 1, "goodput_target", "must be above 0 and at most 1")
    _require(args.custom_output_len is None or args.custom_output_len >= 1, "custom_output_len", "must be at least 1")
    _require(args.top_p is None or 0 < args.top_p <= 1, "top_p", "must be above 0 and at most 1")
    if args.search_goodput:
        _require(bool(args.goodput), "search_goodput", "needs --goodput")
        lists = (args.request_rate, args.max_concurrency or [0], args.background_concurrency or [0])
        single = all(len(one) == 1 for one in lists) and args.num_rounds == 1
        what = "has one --request-rate to begin with, one --max-concurrency and --background-concurrency, and one round"
        _require(single, "search_goodput", what)
    _require(args.save_result or args.result_dir is None, "result_dir", "has no use without --save-result")
    _require(args.compare is not None or args.compare_label is None, "compare_label", "has no use without --compare")
    _require(
        len(set(labels_of(args))) == (1 if args.compare is None else 2), "compare_label", "must differ from --label"
    )
    needs_file = args.dataset_name in ("mooncake", "custom")
    _require(not needs_file or args.dataset_path is not None, "dataset_path", f"is needed by {args.dataset_name}")
    uses_file = needs_file or args.dataset_name == "conversations"
    _require(uses_file or args.dataset_path is None, "dataset_path", f"has no use for {args.dataset_name}")
    for name in ("base_url", "compare"):
        url = getattr(args, name)
        good = url is None or (url.startswith(("http://", "https://")) and _has_host(url))
        _require(good, name, f"must be such as {DEFAULT_URL}, not {without_credentials(str(url))!r}")
    _require(args.endpoint is None or args.endpoint.startswith("/"), "endpoint", "must begin with /")
    percentiles_of(args), metrics_of(args), Slo.parse(args.goodput), metadata_of(args)


def _has_host(url: str) -> bool:
    """Whether a URL has a host, and no port that is none."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _check_load(args: argparse.Namespace) -> None:
    for name in ("prompts_per_concurrency", "background_input_len", "background_output_len"):
        value = getattr(args, name)
        _require(value is None or value >= 1, name, "must be at least 1")
    has_limit = args.max_concurrency is not None
    _require(args.prompts_per_concurrency is None or has_limit, "prompts_per_concurrency", "needs --max-concurrency")
    _require(args.duration is None or 0 < args.duration < math.inf, "duration", "must be above 0")
    _require(not args.warmup_duration or args.duration is not None, "warmup_duration", "needs --duration")
    _require(
        args.duration is None or args.warmup_duration < args.duration, "warmup_duration", "must be below --duration"
    )
    _require(all(one >= 0 for one in args.background_concurrency or []), "background_concurrency", "must be at least 0")
    for name in ("background_input_len", "background_output_len"):
        used = args.background_concurrency is not None
        _require(used or getattr(args, name) is None, name, "has no use without --background-concurrency")


def _require(good: bool, name: str, what: str) -> None:
    if not good:
        raise ConfigError(f"--{name.replace('_', '-')} {what}", field=name)


def labels_of(args: argparse.Namespace) -> list[str]:
    """Return the names of the services in the results."""
    if args.compare is None:
        return [args.label or args.backend or backend_of(args.endpoint or "")]
    urls = (without_credentials(url) for url in (args.base_url, args.compare))
    hosts = [url.partition("://")[2].rstrip("/") for url in urls]
    return [args.label or hosts[0], args.compare_label or hosts[1]]


def check_times(args: argparse.Namespace, *, timed: bool) -> None:
    """Raise ConfigError for a rate where the requests have the times of a file (`timed`)."""
    what = "has no use for a file with times of its own; --mooncake-slowdown-factor scales them"
    _require(not timed or args.request_rate == [math.inf], "request_rate", what)
    _require(not timed or not args.search_goodput, "search_goodput", what)


def percentiles_of(args: argparse.Namespace) -> list[float]:
    """Return `--metric-percentiles`."""
    try:
        found = [float(word) for word in args.metric_percentiles.split(",")]
    except ValueError:
        found = [-1.0]
    _require(all(0 <= one <= 100 for one in found), "metric_percentiles", "must be numbers from 0 to 100, with commas")
    return found


def metrics_of(args: argparse.Namespace) -> list[str]:
    """Return `--percentile-metrics`."""
    found = args.percentile_metrics.split(",")
    _require(set(found) <= set(METRICS), "percentile_metrics", f"must be of {', '.join(METRICS)}, with commas")
    return [str(one) for one in found]


def metadata_of(args: argparse.Namespace) -> dict[str, str]:
    """Return `--metadata` as an object."""
    return _pairs(args.metadata, "metadata")


def _pairs(words: list[str], name: str) -> dict[str, str]:
    _require(all(word.partition("=")[1] and word.partition("=")[0] for word in words), name, "must be KEY=VALUE")
    return {word.partition("=")[0]: word.partition("=")[2] for word in words}


def target_of(args: argparse.Namespace, base_url: str) -> BenchTarget:
    """Return the endpoint that the flags describe, at `base_url`. Raises ConfigError."""
    backend = args.backend or backend_of(args.endpoint or "")
    sampling = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    keys = (args.api_key, os.environ.get(API_KEY), os.environ.get("OPENAI_API_KEY"))
    key = next((one.partition(",")[0].strip() for one in keys if one is not None and one.strip()), None)
    return BenchTarget(
        base_url=base_url,
        backend=backend,
        endpoint=args.endpoint,
        model=args.model,
        api_key=key,
        headers=_pairs(args.header, "header"),
        ignore_eos=args.ignore_eos,
        sampling={name: value for name, value in sampling.items() if value is not None},
        extra_body=_extra(args.extra_body),
        timeout_s=args.request_timeout,
        verify_tls=not args.insecure,
    )


def _extra(text: str | None) -> Mapping[str, Any]:
    try:
        found = {} if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--extra-body is no JSON: {error}", field="extra_body") from error
    _require(isinstance(found, dict), "extra_body", "must be a JSON object")
    return dict(found)


def maker_of(args: argparse.Namespace, backend: str) -> PromptMaker:
    """Return the maker of prompts. Raises ConfigError for a tokenizer that cannot be read, and for ids to chat."""
    by_default = "text" if backend == "openai-chat" else "ids"
    kind = args.prompt_type or by_default
    _require(kind == "text" or backend != "openai-chat", "prompt_type", "must be text for chat")
    name = args.tokenizer
    if name is None and args.model is not None and (Path(args.model) / "tokenizer.json").is_file():
        name = args.model
    return PromptMaker(kind, None if name is None else open_tokenizer(name), args.vocab_size)


def background_of(args: argparse.Namespace) -> tuple[int, int]:
    """Return the lengths of a background request in tokens: its prompt and its answer."""
    return args.background_input_len or BACKGROUND_INPUT_LEN, args.background_output_len or BACKGROUND_OUTPUT_LEN


def lengths_of(args: argparse.Namespace) -> dict[str, int]:
    """Return the lengths of requests for the results: those of random prompts, and of background requests."""
    lengths: dict[str, int] = {}
    if args.dataset_name == "random":
        lengths |= {"random_input_len": args.random_input_len, "random_output_len": args.random_output_len}
    if args.background_concurrency is not None:
        lengths |= dict(zip(("background_input_len", "background_output_len"), background_of(args), strict=True))
    return lengths


def points_of(args: argparse.Namespace) -> list[LoadPoint]:
    """Return the loads: each rate with each concurrency and each number of background clients."""
    lists = (args.request_rate, args.max_concurrency or [None], args.background_concurrency or [None])
    return [LoadPoint(rate=rate, max_concurrency=limit, background=background)
            for rate, limit, background in itertools.product(*lists)]  # fmt: skip


def dataset_of(args: argparse.Namespace, point: LoadPoint | None = None) -> DatasetOptions:
    """Return the dataset that the flags describe; its number of requests is that of a load."""
    num_prompts = args.num_prompts
    if args.prompts_per_concurrency is not None and point is not None and point.max_concurrency is not None:
        num_prompts = args.prompts_per_concurrency * point.max_concurrency
    repeated = args.dataset_name == "prefix_repetition"
    output_len = args.prefix_repetition_output_len if repeated else args.random_output_len
    if args.dataset_name == "custom" and args.custom_output_len is not None:
        output_len = args.custom_output_len
    return DatasetOptions(
        name=args.dataset_name,
        path=args.dataset_path,
        num_prompts=num_prompts,
        input_len=args.random_input_len,
        output_len=output_len,
        range_ratio=args.random_range_ratio,
        prefix_len=args.prefix_repetition_prefix_len if repeated else args.random_prefix_len,
        num_prefixes=args.prefix_repetition_num_prefixes,
        suffix_len=args.prefix_repetition_suffix_len,
        turns=args.conversation_turns,
        turn_pause_s=args.conversation_pause,
        time_scale=args.mooncake_slowdown_factor,
        length_scale=args.length_scale,
        output_override=args.custom_output_len,
    )
