"""`pdserve top URL`: a live view of a deployment in the terminal, from `/observe` of a router or a server.

In a terminal: s and S choose the column that sorts, r reverses the order, e shows or hides transfers, q quits.
Without a terminal, or with `--once`, one table is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from pdserve.cli.fleet import ROLES, SHAPE_ERRORS, FleetClient, Json, add_connection_flags, client_of, other_form
from pdserve.cli.help_pages import CommandParser
from pdserve.errors import ConfigError, RequestError

INTERVAL_S = 1.0
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.2, 3600.0
KEY_WAIT_S = 0.1
WIDTH_WITHOUT_TERMINAL = 140
ROLE_ORDER = ("prefill", "decode", "unified")
STATE_STYLES = {"ready": "green", "draining": "yellow", "breaker open": "yellow"}
FAILED, INTERRUPTED = 1, 130
KEYS = "s/S sort column   r reverse   e transfers   q quit"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerRow:
    """Numbers of one server. None: not known. Tokens per second; pages as a share from 0 to 1; uptime in seconds."""

    role: str
    url: str
    state: str
    running: int | None = None
    waiting: int | None = None
    kv_used: float | None = None
    kv_cached: float | None = None
    tokens_per_s: float | None = None
    hit_rate: float | None = None
    gb_per_s: float | None = None
    in_flight: int | None = None
    accept_length: float | None = None
    uptime_s: float | None = None
    trouble: str = ""


@dataclasses.dataclass(frozen=True)
class Column:
    """One column: heading, field of `ServerRow`, and how a value is written."""

    heading: str
    field: str
    write: Callable[[Any], str] = str
    right: bool = True

    def cell(self, row: ServerRow) -> str:
        """Write the value of a row; `-` for one that is not known."""
        value = getattr(row, self.field)
        return "-" if value is None else self.write(value)


def share(value: float) -> str:
    """Write a share of 1 in percent."""
    return f"{100 * value:.0f}%"


def duration(seconds: float) -> str:
    """Write seconds in the largest two units."""
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if hours >= 48:
        return f"{hours // 24}d {hours % 24}h"
    if hours:
        return f"{hours}h {minutes % 60}m"
    return f"{minutes}m {int(seconds) % 60}s" if minutes else f"{int(seconds)}s"


def size(num_bytes: float) -> str:
    """Write a number of bytes in GB, or in MB below 1 GB."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


COLUMNS = (
    Column("role", "role", right=False),
    Column("server", "url", right=False),
    Column("state", "state", right=False),
    Column("run", "running"),
    Column("wait", "waiting"),
    Column("KV used", "kv_used", share),
    Column("cached", "kv_cached", share),
    Column("tok/s", "tokens_per_s", lambda value: f"{value:.0f}"),
    Column("hits", "hit_rate", share),
    Column("GB/s", "gb_per_s", lambda value: f"{value:.2f}"),
    Column("moving", "in_flight"),
    Column("accept", "accept_length", lambda value: f"{value:.2f}"),
    Column("up", "uptime_s", duration),
    Column("trouble", "trouble", right=False),
)
DROPPED = (
    "accept_length", "gb_per_s", "in_flight", "kv_cached", "uptime_s", "hit_rate", "tokens_per_s", "waiting",
)  # fmt: skip
"""Fields whose columns a narrow terminal does not have, the first one first."""
FOLDED = {"url": 24, "trouble": 14}
"""Fields whose texts are folded, and the characters that they have at least."""
GAP = 2
SORT_NAMES = tuple(column.heading.replace(" ", "-") for column in COLUMNS)


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of `pdserve top`."""
    parser = CommandParser(
        prog="pdserve top",
        allow_abbrev=False,
        description=f"Shows servers, queues, KV memory and rates of a deployment. Keys: {KEYS}.",
    )
    add_connection_flags(parser)
    add = parser.add_argument
    add("--once", action="store_true", help="print one table and end; the default without a terminal")
    add("--interval", type=float, default=INTERVAL_S, metavar="S", help=f"seconds between views ({INTERVAL_S:g})")
    add("--sort", choices=SORT_NAMES, default="role", metavar="COLUMN", help=f"one of {', '.join(SORT_NAMES)}")
    add("--reverse", action="store_true", help="in descending order")
    return parser


def main(argv: Sequence[str]) -> int:
    """Show the deployment; return the exit status: 0, 1 when it does not answer, 130 after Ctrl-C."""
    args = make_parser().parse_args(argv)
    if not MIN_INTERVAL_S <= args.interval <= MAX_INTERVAL_S:
        text = f"--interval is {args.interval:g}, but must be in [{MIN_INTERVAL_S}, {MAX_INTERVAL_S:g}] seconds"
        raise ConfigError(text, field="interval")
    view = TopView(sort=SORT_NAMES.index(args.sort), reverse=args.reverse)
    interactive = sys.stdin.isatty() and sys.stdout.isatty() and not args.once
    with client_of(args) as client:
        try:
            if not interactive:
                width = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS") or WIDTH_WITHOUT_TERMINAL)
                Console(width=width).print(view.render(client.url, read(client)))
                return 0
            return run(client, view, args.interval)
        except RequestError as error:
            print(f"pdserve top: {error.message}", file=sys.stderr)
            return FAILED
        except KeyboardInterrupt:
            return INTERRUPTED


def read(client: FleetClient) -> Json:
    """Return `/observe`. Raises RequestError, with advice where a key is missing."""
    try:
        return client.get_json("/observe", admin=True)
    except RequestError as error:
        if error.status in (401, 403):
            raise RequestError(f"{error.message}; give --admin-api-key or --api-key", status=error.status) from error
        raise


@dataclasses.dataclass
class TopView:
    """What the user has chosen: `sort` is an index of `COLUMNS`. `press` changes it."""

    sort: int = 0
    reverse: bool = False
    edges: bool = True

    def press(self, key: str) -> bool:
        """Obey a key; return False if it ends the view."""
        if key in ("q", "Q", "\x03", "\x04"):
            return False
        if key in ("s", "S"):
            self.sort = (self.sort + (1 if key == "s" else -1)) % len(COLUMNS)
        elif key == "r":
            self.reverse = not self.reverse
        elif key == "e":
            self.edges = not self.edges
        return True

    def sorted_rows(self, rows: Sequence[ServerRow]) -> list[ServerRow]:
        """Sort by the chosen column; unknown values come last, equal ones are in the order of role and URL."""
        field = COLUMNS[self.sort].field
        rows = sorted(rows, key=lambda row: (ROLE_ORDER.index(row.role), row.url))
        known = [row for row in rows if getattr(row, field) is not None]
        unknown = [row for row in rows if getattr(row, field) is None]
        if field == "role":
            return known[::-1] if self.reverse else known
        return sorted(known, key=lambda row: getattr(row, field), reverse=self.reverse) + unknown

    def render(self, url: str, observed: Json, problem: str = "", *, keys: bool = False) -> ObservedView:
        """Return the view of a snapshot. `problem`: why no newer snapshot could be read.

        Raises:
            RequestError: the snapshot has another form than that of pdserve's `/observe`.
        """
        try:
            rows = self.sorted_rows(rows_of(url, observed))
            return ObservedView(
                view=dataclasses.replace(self),
                headline=headline(url, observed, rows),
                states=[row.state for row in rows],
                rows=[{column: column.cell(row) for column in COLUMNS} for row in rows],
                edges=list(edge_lines(observed)) if self.edges else [],
                problem=problem,
                keys=keys,
            )
        except SHAPE_ERRORS as error:
            raise RequestError(other_form(f"{url}/observe", error)) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObservedView:
    """A snapshot as rich prints it: the columns that fit, and with `keys` the lines that fit."""

    view: TopView
    headline: str
    states: list[str]
    rows: list[dict[Column, str]]
    edges: list[str]
    problem: str
    keys: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.headline, style="bold")
        body: list[Table | Text] = [self._table(fit(self.rows, options.max_width))]
        if not self.rows:
            body.append(Text("no servers", style="bold red"))
        if self.edges:
            body.append(Text("KV transfers", style="bold"))
            body += [Text(line, no_wrap=True, overflow="ellipsis") for line in self.edges]
        end = [Text(self.problem, style="bold red")] if self.problem else []
        if not self.keys:
            yield Group(*body, *end)
            return
        end.append(Text(KEYS, style="dim", no_wrap=True, overflow="ellipsis"))
        free = console.height - len(end) - 2  # the first line may be two
        lines = console.render_lines(Group(*body), options, pad=False)
        if len(lines) > free:
            lines = [*lines[: free - 1], [Segment("... more: choose the order with s and r, or use a higher terminal")]]
        yield Segments([segment for line in lines for segment in (*line, Segment.line())])
        yield from end

    def _table(self, fitted: Sequence[tuple[Column, int]]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
        for column, width in fitted:
            mark = ("▼" if self.view.reverse else "▲") if column == COLUMNS[self.view.sort] else ""
            justify: Literal["left", "right"] = "right" if column.right else "left"
            table.add_column(column.heading + mark, justify=justify, width=width, overflow="fold")
        for state, row in zip(self.states, self.rows, strict=True):
            style = STATE_STYLES.get(state, "bold red")
            table.add_row(*(Text(row[each], style=style if each.field == "state" else "") for each, _ in fitted))
        return table


def fit(rows: Sequence[dict[Column, str]], width: int) -> list[tuple[Column, int]]:
    """Return the columns that fit into `width` characters, and the width of each.

    Columns of `DROPPED` are left out, one after the other, until address and trouble have room: long ones are folded.
    """
    longest = {column: max([len(column.heading) + 1, *(len(row[column]) for row in rows)]) for column in COLUMNS}
    least = {column: min(longest[column], FOLDED.get(column.field, longest[column])) for column in COLUMNS}
    kept = list(COLUMNS)
    for field in DROPPED:
        if sum(least[column] + GAP for column in kept) - GAP <= width:
            break
        kept = [column for column in kept if column.field != field]
    spare = max(0, width - sum(least[column] + GAP for column in kept) + GAP)
    fitted = []
    for column in kept:
        more = min(spare, longest[column] - least[column])
        spare -= more
        fitted.append((column, least[column] + more))
    return fitted


def headline(url: str, observed: Json, rows: Sequence[ServerRow]) -> str:
    """Return the first line: address, state of the router, and sums over all servers."""
    router = observed.get("router")
    parts = [url]
    if isinstance(router, dict):
        serving = "serving" if router.get("serving") else "NOT SERVING"
        parts += [f"router {router.get('version', '?')} {serving}", f"queued {router.get('queued', 0)}"]
    generating = [row for row in rows if row.role != "prefill"]
    parts.append(f"running {sum(row.running or 0 for row in generating)}")
    parts.append(f"{sum(row.tokens_per_s or 0.0 for row in generating):.0f} tokens/s")
    down = [pair for pair in observed.get("pairs") or [] if pair.get("serving") is False]
    return "   ".join([*parts, *([f"{len(down)} PAIRS DOWN"] if down else [])])


def rows_of(url: str, observed: Json) -> list[ServerRow]:
    """Return a row for each server of a router's snapshot, or one for a server's own."""
    now = time.time()
    if "workers" not in observed:
        mode = ROLES.get(str((observed.get("server") or {}).get("mode")), "unified")
        return [_row(url, mode, {}, observed, observed.get("edges") or [], now)]
    router_time = (observed.get("router") or {}).get("time", now)
    rows = []
    for worker in observed.get("workers") or []:
        address = str(worker.get("url"))
        edges = [one for one in observed.get("edges") or [] if address in (one.get("from_url"), one.get("to_url"))]
        role = ROLES.get(str(worker.get("worker_type")), "unified")
        rows.append(_row(address, role, worker, worker.get("observed") or {}, edges, router_time))
    return rows


def _row(url: str, role: str, worker: Json, observed: Json, edges: Sequence[Json], now: float) -> ServerRow:
    server, rates = observed.get("server") or {}, observed.get("rates") or {}
    replicas = observed.get("replicas") or []
    states = [one["state"] for one in replicas if one.get("state")]
    pages = [one.get("pages") or {} for one in states]
    total = sum(one.get("total", 0) for one in pages)
    used = sum(one.get("locked", 0) + one.get("leased", 0) for one in pages)
    cached = sum(one.get("evictable", 0) + one.get("locked", 0) for one in pages)
    troubles = [str(one["trouble"]) for one in replicas if one.get("trouble")]
    told = [worker.get("last_error") if worker.get("is_healthy") is False else None, server.get("trouble")]
    told += [*troubles[:1], observed.get("error")]
    return ServerRow(
        role=role,
        url=url,
        state=_state(worker, server),
        running=sum(one.get("running", 0) for one in states) if states else None,
        waiting=sum(one.get("waiting", 0) for one in states) if states else None,
        kv_used=used / total if total else None,
        kv_cached=cached / total if total else None,
        tokens_per_s=rates.get("generation_tokens_per_s") if role != "prefill" else None,
        hit_rate=rates.get("cache_hit_rate"),
        gb_per_s=sum(one.get("gb_per_s") or 0.0 for one in edges) if edges else None,
        in_flight=sum(one.get("in_flight") or 0 for one in edges) if edges else None,
        accept_length=rates.get("spec_accept_length"),
        uptime_s=max(0.0, now - server["started_at"]) if server.get("started_at") else None,
        trouble=next((str(one) for one in told if one), ""),
    )


def _state(worker: Json, server: Json) -> str:
    if worker.get("is_healthy") is False:
        return "dead"
    if worker.get("draining"):
        return "draining"
    if worker.get("breaker") not in (None, "closed"):
        return f"breaker {worker['breaker']}".replace("_", " ")
    return "not ready" if server.get("status") == "not_ready" else "ready"


def edge_lines(observed: Json) -> Iterator[str]:
    """Yield a line for each edge between two servers, those with most bytes first, at most 12."""
    edges = sorted(observed.get("edges") or [], key=lambda one: -(one.get("bytes") or 0))
    for edge in edges[:12]:
        ends = [str(edge.get(f"{end}_url") or edge.get(end)) for end in ("from", "to")]
        moved = f"{size(edge.get('bytes') or 0)} in {edge.get('transfers', 0)} transfers"
        now = f"{edge.get('gb_per_s') or 0.0:.2f} GB/s, {edge.get('in_flight', 0)} in flight"
        failed = f", {edge['failures']} failed" if edge.get("failures") else ""
        state = "" if edge.get("peer_state") in ("ready", None) else f" [{edge['peer_state']}]"
        yield f"  {ends[0]} -> {ends[1]}: {now}, {moved}{failed}{state}"


class Poller:
    """Reads snapshots in a thread, so that keys are obeyed while a server is slow. Use as a context manager."""

    def __init__(self, client: FleetClient, interval_s: float) -> None:
        self._client, self._interval_s = client, interval_s
        self._stop = threading.Event()
        self.read: queue.SimpleQueue[Json | RequestError] = queue.SimpleQueue()

    def __enter__(self) -> Poller:
        threading.Thread(target=self._run, name="top-poller", daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.read.put(read(self._client))
            except RequestError as error:
                self.read.put(error)
            self._stop.wait(self._interval_s)


def run(client: FleetClient, view: TopView, interval_s: float) -> int:
    """Show views until the user quits; return 0. Raises RequestError if the first reading fails."""
    observed, problem = read(client), ""
    with raw_keys(), Poller(client, interval_s) as poller, Live(screen=True, auto_refresh=False) as live:
        while True:
            live.update(view.render(client.url, observed, problem, keys=True), refresh=True)
            key = next_key(KEY_WAIT_S)
            if key and not view.press(key):
                return 0
            with contextlib.suppress(queue.Empty):
                found = poller.read.get_nowait()
                if isinstance(found, RequestError):
                    problem = f"not current: {found.message}"
                else:
                    observed, problem = found, ""


def next_key(timeout_s: float) -> str:
    """Return the next key of stdin, empty if none comes within `timeout_s`; Ctrl-D for the end of stdin."""
    ready, _, _ = select.select([sys.stdin], [], [], timeout_s)
    return (os.read(sys.stdin.fileno(), 1).decode(errors="replace") or "\x04") if ready else ""


@contextlib.contextmanager
def raw_keys() -> Iterator[None]:
    """Have the terminal pass on each key at once, without echo; Ctrl-C stays a signal."""
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
