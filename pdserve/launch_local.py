"""`python -m pdserve.launch_local --model-path M --prefill 1 --decode 1`: prefill, decode and router on one machine.

Starts the servers on free loopback ports with a shared random secret, waits for each, and starts the router. The
servers get equal shares of the cores: two model steps that share all cores cost several times their shares.
Prints one line per process, and the URL and key for clients. Ctrl-C or SIGTERM ends router, decode and prefill, in that
order; so does the death of any process, unless `--keep-going`. Unknown flags go to the servers: flags of one role
(`--disaggregation-decode-enable-radix-cache`) to its servers only, trace flags also to the router.

Where the kernel compares niceness within sessions, all of this happens in a child process with a session of its own,
so that prefill gives way to decode and the router and not to other programs (`base/nice_scope`).

    main thread:   spawn servers -> wait ready -> spawn router -> wait ready -> wait for an event -> end all in order
    other threads: read output and watch processes; they only put events on the queue
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import queue
import secrets
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn, get_args

from pdserve.base.cpu_affinity import cores_of, share_cores
from pdserve.base.env import CONTROL_TOKEN, WORKER_PROOF_KEY
from pdserve.base.log import JsonLabel, TextLabel, setup_logging
from pdserve.base.nice_scope import NiceScope, in_own_session, nice_scope
from pdserve.base.plugins import POLICY_PLUGINS, plugin_names
from pdserve.base.process import Child, ChildError, ServerReady, end_all
from pdserve.base.startup_progress import ANNOUNCE, STARTING, parse_status
from pdserve.base.status_block import StatusBlock
from pdserve.config import ServerConfig
from pdserve.config.local_access import (
    LocalAccess,
    Role,
    access_of,
    add_access,
    flags_for,
    flags_for_router,
    log_format_of,
)
from pdserve.errors import ConfigError, PdserveError
from pdserve.http.session_proof import worker_secret
from pdserve.launch_checks import check_service, parse_service
from pdserve.router.config.config import POLICY_HELP, PolicyName

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
OWNED_FLAGS = {
    "--port": "--router-port",
    "--host": "--router-host",
    "--disaggregation-mode": None,
    "--disaggregation-bootstrap-port": None,
}
"""Flags of servers that users cannot give here, and the flag of the service in their place; None: there is none."""
DECODE_CACHE = "--disaggregation-decode-enable-radix-cache"
LOOPBACK = "127.0.0.1"
PREFILL_NICENESS = 5
"""Niceness of prefill's engine processes where each thread of all servers has a core: ITL matters more than TTFT.
With fewer cores than threads, a nice prefill server would hardly run beside a busy decode server. The kernel weighs a
session on each core by its processes there: at 19 other programs would get prefill's core while decode is busy.
"""
SHARED_NICENESS = 3
"""Niceness instead of `PREFILL_NICENESS` where the kernel also compares it with other programs; see `base/nice_scope`.
On a core with one of these, a process has 34% at 3, 25% at 5 and 1% at 19.
"""

SERVER_COMMAND = (sys.executable, "-m", "pdserve.launch_server")
ROUTER_COMMAND = (sys.executable, "-m", "pdserve.launch_router")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalConfig:
    """Processes to start, and their flags.

    `server_flags` go to all servers, flags of one role to its servers only. `prefill_flags` and `decode_flags` go to
    one role, for flags that both roles have. `router_flags` go to the router. Durations are in seconds.
    """

    model_path: str
    num_prefill: int = 1
    num_decode: int = 1
    router_host: str = LOOPBACK
    router_port: int = 8000
    policy: str = "least_loaded"
    cpu_threads: int | None = None
    cpu_pin: str | None = None
    log_dir: Path | None = None
    keep_going: bool = False
    ready_timeout_s: float = 600.0
    grace_s: float = 10.0
    server_flags: tuple[str, ...] = ()
    prefill_flags: tuple[str, ...] = ()
    decode_flags: tuple[str, ...] = ()
    router_flags: tuple[str, ...] = ()
    access: LocalAccess = LocalAccess()
    niceness: int = PREFILL_NICENESS

    def __post_init__(self) -> None:
        """Check counts, cores, and that no server flag is one that `launch_local` sets itself. Raises ConfigError."""
        if self.num_prefill < 1 or self.num_decode < 1:
            raise ConfigError("--prefill and --decode must be at least 1")
        if self.cpu_threads is not None and self.cpu_threads < 1:
            raise ConfigError("--cpu-threads must be at least 1", field="cpu_threads")
        if self.cpu_pin is not None and len(cores_of(self.shares[0])) < self.threads_per_server:
            needed = self.num_servers * self.threads_per_server
            raise ConfigError(f"--cpu-pin {self.cpu_pin} has too few cores, {needed} are needed", field="cpu_pin")
        for given in (*self.server_flags, *self.prefill_flags, *self.decode_flags):
            name = given.partition("=")[0]
            if name in OWNED_FLAGS:
                hint = "leave it out" if OWNED_FLAGS[name] is None else f"give {OWNED_FLAGS[name]} for the service"
                raise ConfigError(f"launch_local chooses {name} of each server itself; {hint}")

    @property
    def threads_per_server(self) -> int:
        """CPU threads of each server: an equal share of the cores that this process may use, at least one."""
        if self.cpu_threads is not None:
            return self.cpu_threads
        if self.cpu_pin is not None:
            return len(cores_of(self.cpu_pin)) // self.num_servers
        return max(1, len(os.sched_getaffinity(0)) // self.num_servers)

    @property
    def num_servers(self) -> int:
        """Servers of both roles."""
        return self.num_prefill + self.num_decode

    @property
    def prefill_niceness(self) -> int:
        """`niceness`, or 0 where the servers have more threads than there are cores."""
        return self.niceness if self.threads_per_server * self.num_servers <= len(os.sched_getaffinity(0)) else 0

    @property
    def shares(self) -> list[str]:
        """The `--cpu-pin` of each server, prefill first; empty without `--cpu-pin`."""
        return [] if self.cpu_pin is None else share_cores(self.cpu_pin, self.num_servers)


def server_argv(config: LocalConfig, role: Role, index: int = 0) -> list[str]:
    """Return the arguments of server `index` of `role`, without the command."""
    argv = ["--model-path", config.model_path, "--host", LOOPBACK, "--port", "0", "--disaggregation-mode", role]
    argv += ["--forwarded-allow-ips", LOOPBACK]  # the router forwards the address of the client
    if role == "prefill":
        argv += ["--disaggregation-bootstrap-port", "0", "--cpu-nice", str(config.prefill_niceness)]
    own = config.prefill_flags if role == "prefill" else config.decode_flags
    argv += ["--cpu-threads", str(config.threads_per_server), *config.access.server_flags]
    if config.cpu_pin is not None:
        argv += ["--cpu-pin", config.shares[index if role == "prefill" else config.num_prefill + index]]
    return [*argv, *flags_for(role, config.server_flags), *own]


def router_argv(config: LocalConfig, prefills: Sequence[ServerReady], decodes: Sequence[ServerReady]) -> list[str]:
    """Return the arguments of the router for servers that are ready."""
    argv = ["--pd-disaggregation", "--host", config.router_host, "--port", str(config.router_port)]
    argv += ["--policy", config.policy, *config.access.router_flags]
    for ready in prefills:
        argv += ["--prefill", ready.url, "none" if ready.bootstrap_port is None else str(ready.bootstrap_port)]
    for ready in decodes:
        argv += ["--decode", ready.url]
    return [*argv, *flags_for_router(config.server_flags), *config.router_flags]


def child_env(config: LocalConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the servers' environment: control token, API keys, numbers of threads."""
    threads = dict.fromkeys(THREAD_VARIABLES, str(config.threads_per_server))
    env = {CONTROL_TOKEN: secrets.token_hex(32)} | dict(inherited) | config.access.env | threads
    env.pop(WORKER_PROOF_KEY, None)
    return env | {ANNOUNCE: "1"}


def router_env(servers: Mapping[str, str]) -> dict[str, str]:
    """Return the router's environment: the servers', with a proof key derived from the control token instead of it."""
    env = dict(servers)
    token = env.pop(CONTROL_TOKEN, "").strip()
    return env | {WORKER_PROOF_KEY: worker_secret(token).hex()} if token else env


class LocalService:
    """Owns all child processes of one service. Main thread only."""

    def __init__(
        self,
        config: LocalConfig,
        *,
        server_command: Sequence[str] = SERVER_COMMAND,
        router_command: Sequence[str] = ROUTER_COMMAND,
        say: Callable[[str], None] = lambda line: print(line, flush=True),
    ) -> None:
        self._config = config
        self.access = config.access
        self._server_command, self._router_command = server_command, router_command
        self._say = say
        self._env = child_env(config, os.environ)
        self._servers: dict[Role, list[Child]] = {"prefill": [], "decode": []}
        self._routers: list[Child] = []
        self._logs = contextlib.ExitStack()
        self._ending = False
        self._status = StatusBlock()
        self.events: queue.SimpleQueue[Child | signal.Signals] = queue.SimpleQueue()

    def start(self) -> str:
        """Start all processes and return the router's URL; shows what each does meanwhile.

        Raises:
            ChildError: a process does not become ready.
        """
        with self._status:
            return self._start()

    def _start(self) -> str:
        counts: dict[Role, int] = {"prefill": self._config.num_prefill, "decode": self._config.num_decode}
        for role, count in counts.items():
            for index in range(count):
                argv = [*self._server_command, *server_argv(self._config, role, index)]
                self._servers[role].append(self._spawn(f"{role}-{index}", argv, self._env))
        deadline = time.monotonic() + self._config.ready_timeout_s
        ready = {role: [self._wait(child, deadline) for child in group] for role, group in self._servers.items()}
        argv = [*self._router_command, *router_argv(self._config, ready["prefill"], ready["decode"])]
        self._routers.append(self._spawn("router", argv, router_env(self._env)))
        return self._wait(self._routers[0], deadline).url

    def run(self) -> int:
        """Wait for a signal (returns 0) or the death of a process, with `keep_going` of all processes (returns 1)."""
        while True:
            event = self.events.get()
            if isinstance(event, signal.Signals):
                return 0
            self._say(f"{event.name} (pid {event.pid}) has ended unexpectedly")
            if not self._config.keep_going or all(child.exited for child in self._children()):
                return 1

    def close(self) -> None:
        """End router, then decode, then prefill, until no process is left."""
        self._ending = True
        for group in (self._routers, self._servers["decode"], self._servers["prefill"]):
            end_all(group, self._config.grace_s)
        self._logs.close()

    def _children(self) -> list[Child]:
        return [*self._routers, *self._servers["decode"], *self._servers["prefill"]]

    def _wait(self, child: Child, deadline: float) -> ServerReady:
        """Wait until `child` is ready. A death of another child or a signal ends the wait, too."""
        while True:
            try:
                ready = child.wait_ready(min(0.2, max(0.0, deadline - time.monotonic())))
            except ChildError:
                self._check_start(child, deadline)
                continue
            where = "" if ready.bootstrap_port is None else f"  bootstrap port {ready.bootstrap_port}"
            self._status.remove(child.name)
            line = f"{child.name:<10} {ready.url}{where}  pid {child.pid}"
            self._status.above(functools.partial(self._say, line))
            return ready

    def _check_start(self, child: Child, deadline: float) -> None:
        """Raise on a signal, on the death of a child, or past the deadline."""
        with contextlib.suppress(queue.Empty):
            event = self.events.get_nowait()
            if isinstance(event, signal.Signals):
                raise KeyboardInterrupt
            place = "its output" if self._config.log_dir is None else str(self._config.log_dir / f"{event.name}.log")
            raise ChildError(f"{event.name} (pid {event.pid}) ended before the service was ready; {place} says why")
        if time.monotonic() >= deadline:
            raise ChildError(f"{child.name} (pid {child.pid}) was not ready within {self._config.ready_timeout_s:g} s")

    def _spawn(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> Child:
        write = self._line_writer(name)

        def read(line: str) -> None:
            status = parse_status(line)
            if status is None:
                self._status.above(lambda: write(line))
            else:
                self._status.set(name, status)

        self._status.set(name, STARTING)
        return Child(name, argv, env=env, on_line=read, on_exit=self._on_exit)

    def _on_exit(self, child: Child) -> None:
        if not self._ending:
            self.events.put(child)

    def _line_writer(self, name: str) -> Callable[[str], None]:
        """Return a writer of a child's output lines: to its file in the log directory, or to stderr with its name."""
        if self._config.log_dir is None:
            label = JsonLabel(name) if log_format_of(self._config.server_flags) == "json" else TextLabel(name)
            return lambda line: print(label(line), file=sys.stderr, flush=True)
        self._config.log_dir.mkdir(parents=True, exist_ok=True)
        file: IO[str] = self._logs.enter_context((self._config.log_dir / f"{name}.log").open("a", buffering=1))
        lock = threading.Lock()

        def write(line: str) -> None:
            with lock:
                if not file.closed:
                    file.write(line + "\n")

        return write


class LocalParser(argparse.ArgumentParser):
    """Raises ConfigError in place of an exit."""

    def error(self, message: str) -> NoReturn:
        """Raise the error."""
        raise ConfigError(message)


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the service's flags; unknown flags are left for the servers."""
    parser = LocalParser(prog="python -m pdserve.launch_local", allow_abbrev=False, description=__doc__)
    add = parser.add_argument
    add("--model-path", default="smollm2", help="model of all servers, as launch_server takes it")
    add("--prefill", type=int, default=1, help="number of prefill servers")
    add("--decode", type=int, default=1, help="number of decode servers")
    add("--router-host", default=LOOPBACK, help="address the router listens on")
    add("--router-port", type=int, default=8000, help="0 picks a free one")
    add(
        "--policy",
        choices=(*get_args(PolicyName), *plugin_names(POLICY_PLUGINS)),
        help=f"{POLICY_HELP}; default: the last where decode caches, else least_loaded",
    )
    for name, such in (("prefill", "--tp-size 2"), ("decode", "--tp-size 2"), ("router", "--queue-size 9")):
        text = f"flags of {name} alone, in one argument, such as '{such}'"
        add(f"--{name}-flags", type=shlex.split, default=[], metavar="FLAGS", help=text)
    add("--cpu-threads", type=int, help="CPU threads per server; an equal share of the cores when absent")
    add("--cpu-pin", metavar="CORES", help="cores for the servers, divided among them: auto, or such as 0-3,8")
    add("--log-dir", type=Path, help="directory of one log file per process, instead of the terminal")
    add("--keep-going", action="store_true", help="continue without a process that died; no process is restarted")
    add("--ready-timeout", type=float, default=600.0, help="seconds until every process must be ready")
    add("--grace", type=float, default=10.0, help="seconds that a process may take to end before it is killed")
    add_access(parser)
    return parser


def config_from(argv: Sequence[str] | None) -> LocalConfig:
    """Parse `argv`; unknown flags become `server_flags`. Raises ConfigError."""
    args, rest = make_parser().parse_known_args(argv)
    return LocalConfig(
        model_path=args.model_path,
        num_prefill=args.prefill,
        num_decode=args.decode,
        router_host=args.router_host,
        router_port=args.router_port,
        policy=args.policy or ("consistent_hashing" if DECODE_CACHE in (*rest, *args.decode_flags) else "least_loaded"),
        cpu_threads=args.cpu_threads,
        cpu_pin=args.cpu_pin,
        log_dir=args.log_dir,
        keep_going=args.keep_going,
        ready_timeout_s=args.ready_timeout,
        grace_s=args.grace,
        server_flags=tuple(rest),
        prefill_flags=tuple(args.prefill_flags),
        decode_flags=tuple(args.decode_flags),
        router_flags=tuple(args.router_flags),
        access=access_of(args),
    )


def parse_servers(config: LocalConfig) -> list[ServerConfig]:
    """Return the configuration of one server of each role. Raises ConfigError."""
    own = {option for action in make_parser()._actions for option in action.option_strings}
    os.environ.update(config.access.env)  # the parts get it, too: keys, and the password of a certificate
    return parse_service([server_argv(config, "prefill"), server_argv(config, "decode")], own, OWNED_FLAGS)


def check(config: LocalConfig, servers: Sequence[ServerConfig]) -> None:
    """Check flags, ports and model of all parts, once for all; a model id is downloaded. Raises PdserveError."""
    prefill, decode = (ServerReady(role=role, url=f"http://{role}") for role in ("prefill", "decode"))
    check_service(servers, router_argv(config, [prefill], [decode]))


@contextlib.contextmanager
def signals_as_events(service: LocalService) -> Iterator[None]:
    """Put SIGINT and SIGTERM on the service's queue; restores the former handlers at the end of the block."""
    caught = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(signum, lambda num, _: service.events.put(signal.Signals(num))) for signum in caught]
    try:
        yield
    finally:
        for signum, handler in zip(caught, before, strict=True):
            signal.signal(signum, handler)


def serve(service: LocalService) -> int:
    """Start, run and end a service; return the exit status."""
    with signals_as_events(service):
        try:
            url = service.start()
            print(f"ready: OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={service.access.client_key}", flush=True)
            return service.run()
        except KeyboardInterrupt:
            return 0
        except ChildError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        finally:
            service.close()


def check_and_serve(config: LocalConfig, servers: Sequence[ServerConfig]) -> int:
    """Check the parts, download the model if that is needed, and serve; return the exit status."""
    try:
        check(config, servers)
    except PdserveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # during a download
        return 0
    return serve(LocalService(config))


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 after Ctrl-C or SIGTERM, 1 when a process died, 2 for wrong flags."""
    try:
        config = config_from(argv)
        servers = parse_servers(config)
        setup_logging(servers[0].observe.log_level, "local", servers[0].observe.log_format)
    except PdserveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    scope = nice_scope()
    if scope is NiceScope.SHARED:
        config = dataclasses.replace(config, niceness=SHARED_NICENESS)
    if scope is NiceScope.SESSION and config.prefill_niceness:
        return in_own_session(lambda: check_and_serve(config, servers))  # a download starts threads: fork before
    return check_and_serve(config, servers)


if __name__ == "__main__":
    sys.exit(main())
