"""`pdserve bench`: runs a benchmark from the command line, with a progress bar, and writes its results.

Exit status: 0, 1 when a run has no answer, 2 for wrong flags or a service that does not answer, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdserve import __version__
from pdserve.base.host_facts import cpu_model
from pdserve.base.hosts import without_credentials
from pdserve.bench import flags, html_report, text_report
from pdserve.bench.campaign import BenchPlan, BenchProgress, BenchService, Campaign, wait_ready, wait_serving
from pdserve.bench.client import BenchClient, BenchRecord, BenchTarget
from pdserve.bench.datasets import background_turns, make_sessions
from pdserve.bench.metrics import Slo
from pdserve.cli.help_pages import CommandParser
from pdserve.errors import ConfigError

Json = dict[str, Any]
FAILED, INTERRUPTED = 1, 130
SECRET_FLAGS = ("api_key", "header", "extra_body")


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of `pdserve bench`."""
    text = (
        "Sends requests to a service and measures what its clients get. `pdserve bench compare` draws several results."
    )
    parser = CommandParser(prog="pdserve bench", allow_abbrev=False, description=text)
    flags.add_flags(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; return the exit status."""
    args = make_parser().parse_args(argv)
    flags.check(args)
    check_outputs(args)
    progress = BarProgress(disabled=args.disable_tqdm)
    status = 0
    try:
        report = asyncio.run(run(args, progress))
    except KeyboardInterrupt:
        progress.close()
        if not progress.results:
            return INTERRUPTED
        print("interrupted: these are the runs that have ended", file=sys.stderr)
        report, status = head(args) | {"results": progress.results}, INTERRUPTED
    show(args, report)
    save(args, report)
    answered = all(result["completed"] or result.get("total_output_tokens") for result in report["results"])
    return status or (0 if answered else FAILED)


class BarProgress(BenchProgress):
    """A tqdm bar for each run, on stderr; without a terminal a line at its end. `results` has the runs that ended."""

    def __init__(self, *, disabled: bool) -> None:
        self.results: list[Json] = []
        self._disabled = disabled or not sys.stderr.isatty()
        self._prints = self._disabled and not disabled
        self._what = ""
        self._bar: Any = None
        self._failed = self._tokens = 0
        self._began = 0.0

    def begin(self, what: str, num_requests: int) -> None:
        """Show a new bar."""
        from tqdm import tqdm

        self._failed = self._tokens = 0
        self._began, self._what = time.perf_counter(), what
        self._bar = tqdm(total=num_requests, desc=what, unit="req", disable=self._disabled, leave=True)

    def done(self, record: BenchRecord) -> None:
        """Advance it."""
        self._failed += record.error_kind is not None
        self._tokens += record.output_tokens
        rate = self._tokens / max(1e-9, time.perf_counter() - self._began)
        failed = f", {self._failed} failed" if self._failed else ""
        self._bar.set_postfix_str(f"{rate:.0f} tok/s{failed}", refresh=False)
        self._bar.update()

    def end(self, result: Json | None) -> None:
        """Close it, and keep the result."""
        self.close()
        if result is None:
            return
        self.results.append(result)
        if self._prints:
            counts = f"{result['completed']} answers, {result['failed']} failed, {result['duration']:.1f} s"
            print(f"{self._what}: {counts}, {result['output_throughput']:.1f} tok/s", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Close the bar of a run that was interrupted, too."""
        if self._bar is not None:
            self._bar.close()


async def run(args: argparse.Namespace, progress: BarProgress | None = None) -> Json:
    """Run what the flags say; return the report, which is written as JSON."""
    targets = [flags.target_of(args, url) for url in (args.base_url, args.compare) if url is not None]
    labels = flags.labels_of(args)
    maker, points = flags.maker_of(args, targets[0].backend), flags.points_of(args)
    input_len, output_len = flags.background_of(args)
    first = make_sessions(
        flags.dataset_of(args, points[0]), maker, args.seed
    )  # a mistake in a file shows before anything is sent
    flags.check_times(args, timed=any(one.at_s is not None for one in first))
    plan = BenchPlan(
        sessions=lambda seed, point: make_sessions(flags.dataset_of(args, point), maker, seed),
        background=lambda seed: background_turns(maker, seed, input_len, output_len),
        duration_s=args.duration,
        warmup_s=args.warmup_duration,
        points=points,
        rounds=args.num_rounds,
        warmups=args.num_warmups,
        burstiness=args.burstiness,
        seed=args.seed,
        slo=Slo.parse(args.goodput),
        goodput_target=args.goodput_target,
        metrics=flags.metrics_of(args),
        percentiles=flags.percentiles_of(args),
        save_detailed=args.save_detailed,
        facts={
            "tokenizer_id": args.tokenizer,
            "dataset_name": args.dataset_name,
            **flags.lengths_of(args),
            **flags.metadata_of(args),
        },
    )
    async with contextlib.AsyncExitStack() as stack:
        services = [
            BenchService(label=label, client=await _opened(stack, target, args.ready_check_timeout_sec))
            for label, target in zip(labels, targets, strict=True)
        ]
        campaign = Campaign(plan, services, progress or BarProgress(disabled=args.disable_tqdm))
        if not args.search_goodput:
            return head(args) | {"results": await campaign.run()}
        await campaign.warm_up()
        rate = args.request_rate[0] if math.isfinite(args.request_rate[0]) else 1.0
        found = [await campaign.search(service, rate, points[0]) for service in services]
        return head(args) | {
            "goodput_search": [best for best, _ in found],
            "results": [result for _, results in found for result in results],
        }


async def _opened(stack: contextlib.AsyncExitStack, target: BenchTarget, ready_s: float) -> BenchClient:
    """Open a client; without a model name the target gets the service's first one."""
    client = await stack.enter_async_context(BenchClient(target))
    if target.model is not None and ready_s == 0:
        return client
    began = time.monotonic()
    try:
        model = await wait_ready(client, ready_s)
    except ConfigError:
        if target.backend != "sglang" or ready_s > 0:
            raise
        return client  # /generate needs no model
    client.target = dataclasses.replace(target, model=target.model or model)
    if ready_s > 0:
        await wait_serving(client, ready_s - (time.monotonic() - began))
    return client


def head(args: argparse.Namespace) -> Json:
    """Return the fields of a report besides its results."""
    host = {"cpus": os.cpu_count(), "cpu_model": cpu_model(), "platform": platform.platform()}
    host["python"] = platform.python_version()
    return {"benchmark": "pdserve bench", "version": __version__, "flags": shown_flags(args), "machine": host}


def shown_flags(args: argparse.Namespace) -> Json:
    """Return the flags for the report: nothing secret, and only values that JSON has."""
    return {name: _shown(value) for name, value in sorted(vars(args).items()) if name not in SECRET_FLAGS}


def _shown(value: Any) -> Any:
    if isinstance(value, list):
        return [_shown(one) for one in value]
    if isinstance(value, str | Path):
        return without_credentials(str(value))
    return "inf" if value == math.inf else value


def show(args: argparse.Namespace, report: Json) -> None:
    """Print the results."""
    results = report["results"]
    if len(results) == 1:
        print(text_report.block(results[0], flags.metrics_of(args), flags.percentiles_of(args)))
    else:
        print(text_report.table(results))
    for best in report.get("goodput_search", []):
        target, told = f"{best['goodput_target']:.0%}", text_report.best_rate(best)
        print(f"{best['label']}: the highest rate that keeps {target} within the limits: {told}")


def check_outputs(args: argparse.Namespace) -> None:
    """Check before the first run that the results can be written. Raises ConfigError naming the flag."""
    for name in ("output_json", "output_html", "output_png", "result_dir"):
        check_writable(name, getattr(args, name))
    if args.output_png is not None:
        html_report.check_png()


def check_writable(name: str, path: Path | None) -> None:
    """Make the folder of the file that a flag names. Raises ConfigError naming the flag when that cannot be written."""
    if path is None:
        return
    folder = path if name == "result_dir" else path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--{name.replace('_', '-')} {path}: cannot be written: {error}", field=name) from error
    if not os.access(folder, os.W_OK) or (path is not folder and path.is_dir()):
        raise ConfigError(f"--{name.replace('_', '-')} {path}: cannot be written", field=name)


def save(args: argparse.Namespace, report: Json) -> None:
    """Write the files that the flags ask for. Raises ConfigError for a file that cannot be written."""
    if args.output_json is not None:
        write(args.output_json, json.dumps(report, indent=2, allow_nan=False) + "\n", "--output-json")
    if args.output_html is not None:
        write(args.output_html, html_report.page(report), "--output-html")
    if args.output_png is not None:
        write(args.output_png, html_report.png(report), "--output-png")
    if args.save_result:
        folder = args.result_dir or Path()
        for result in report["results"]:
            limit = "" if result["max_concurrency"] is None else f"-concurrency{result['max_concurrency']}"
            model = str(result["model_id"]).rsplit("/", 1)[-1]
            name = f"{result['label']}-{result['request_rate']}qps{limit}-{model}-seed{result['seed']}"
            name += f"-{result['date']}.json"
            write(folder / name.replace("/", "_"), json.dumps(result, allow_nan=False) + "\n", "--result-dir")


def write(path: Path, content: str | bytes, flag: str) -> None:
    """Write a file and say so."""
    try:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    except OSError as error:
        field = flag.strip("-").replace("-", "_")
        raise ConfigError(f"{flag} {path}: cannot be written: {error}", field=field) from error
    print(f"wrote {path}", file=sys.stderr)
