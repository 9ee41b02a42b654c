"""Workers from pods: watches the pods with the configured labels, and adds and removes workers. Made by `app`.

    list ──> the pods of now ──> watch from that version ──> events ──> the server ends the watch ──> watch again
      ^                                                        │
      └──────── 410: the version is too old ───────────────────┴──> broken, refused: back-off, then watch again

    pod ready ──> worker added ──> pod not ready: no new requests while another worker of its role is ready
                                ──> pod terminating, ended, deleted, or without the labels: drained, then removed

While the API server is away, workers stay as they are: health checks find those that have died. Workers that were given
by flags or `POST /workers` are never changed. Each replica of a router watches by itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import Callable, Iterable

import aiohttp

from pdserve.base.hosts import url_host
from pdserve.base.log import SparingLog, no_request
from pdserve.router.config.config import WorkerRole, WorkerSpec
from pdserve.router.config.discovery import DiscoveryConfig, matches
from pdserve.router.discovery.kube_api import OPEN, KubeApi, KubeError, KubePod, VersionExpiredError
from pdserve.router.workers.metrics import RouterMetrics
from pdserve.router.workers.outcome import describe
from pdserve.router.workers.workers import Registry, Worker

log = logging.getLogger(__name__)

SHORT_WATCH_S = 5.0
"""A watch that ends sooner and without an event counts as failed, so that the router does not call in a tight loop."""
JITTER = 0.2
ENDED_PHASES = ("Succeeded", "Failed")


@dataclasses.dataclass
class DiscoveredPod:
    """A pod whose worker was added. `worker_id`: a worker that changes its role keeps its id."""

    name: str
    url: str
    worker_id: str


class PodWorkers:
    """Adds and removes the workers of pods. `on_change` is called whenever the usable workers may have changed."""

    def __init__(self, config: DiscoveryConfig, registry: Registry, on_change: Callable[[], None]) -> None:
        self._config = config
        self._registry = registry
        self._on_change = on_change
        self._pods: dict[str, DiscoveredPod] = {}
        """Pods whose workers are in use, by uid."""
        self._leaving: dict[str, str] = {}
        """Uid of the pod of each worker that is drained here, by the worker's id."""
        registry.on_forgotten.append(self._forget)
        self._warnings = SparingLog(log)

    def replace(self, pods: Iterable[KubePod]) -> None:
        """Take a complete list: pods that are not in it are gone."""
        listed = {pod.uid: pod for pod in pods}
        for uid in [uid for uid in self._pods if uid not in listed]:
            self.gone(uid, "it is not listed any more")
        for pod in listed.values():
            self.apply(pod)

    def apply(self, pod: KubePod) -> None:
        """Take the present state of one pod."""
        role = self._role_of(pod)
        if role is None or pod.terminating or pod.phase in ENDED_PHASES:
            ended = "it has ended" if role is not None else "its labels are not selected any more"
            self.gone(pod.uid, "it is terminating" if pod.terminating else ended)
            return
        url = None if pod.ip is None else f"http://{url_host(pod.ip)}:{self._config.port}"
        known = self._pods.get(pod.uid)
        if known is not None and known.url != url:
            self.gone(pod.uid, f"its address is {pod.ip} now")
            known = None
        ready = pod.ready and pod.phase == "Running"
        if known is None:
            if url is not None and ready:
                self._add(pod, role, url)
            return
        worker = self._worker(known)
        if worker is not None and worker.pod_ready != ready:
            log.info("pod %s is %s", known.name, "ready" if ready else "not ready")
            worker.pod_ready = ready
            self._on_change()

    def gone(self, uid: str, reason: str) -> None:
        """Drain the worker of a pod, and remove it when its last request has ended."""
        known = self._pods.pop(uid, None)
        worker = None if known is None else self._worker(known)
        if known is None or worker is None:
            return
        log.info("pod %s leaves: %s", known.name, reason)
        if not worker.leaving:  # else it was removed through the API, and stays removed
            self._leaving[worker.id] = uid
        self._registry.remove(worker)
        self._on_change()

    def _add(self, pod: KubePod, role: WorkerRole, url: str) -> None:
        name = f"{pod.namespace}/{pod.name}"
        there = self._registry.find(url)
        if there is not None and self._leaving.pop(there.id, None) == pod.uid:
            log.info("pod %s is selected again", name)
            self._registry.resume(there)
            there.pod_ready = True
            self._pods[pod.uid] = DiscoveredPod(name, url, there.id)
            self._on_change()
            return
        if there is not None:
            owner = next((uid for uid, one in self._pods.items() if one.worker_id == there.id), None)
            if owner is None and not there.leaving:
                self._warnings.warning("pod %s is not added: %s is a worker already", name, url)
                return
            if owner is not None:
                del self._pods[owner]
            there.lose("its pod has been replaced by another one with the same address")
            self._registry.forget(there)
        port = self._bootstrap_port(pod) if role is WorkerRole.PREFILL else None
        ask = role is WorkerRole.PREFILL and port is None
        log.info("pod %s is a %s worker: %s", name, role, url)
        worker = self._registry.add(WorkerSpec(role=role, url=url, bootstrap_port=port, ask_bootstrap_port=ask))
        self._pods[pod.uid] = DiscoveredPod(name, url, worker.id)
        self._on_change()

    def _forget(self, worker: Worker) -> None:
        self._leaving.pop(worker.id, None)

    def _worker(self, known: DiscoveredPod) -> Worker | None:
        """Return the worker of a pod; None if it was removed by `DELETE /workers`."""
        worker = self._registry.find(known.url)
        return worker if worker is not None and worker.id == known.worker_id else None

    def _role_of(self, pod: KubePod) -> WorkerRole | None:
        """Return the role that a pod's labels state; None: no role, or two."""
        if not self._config.pd:
            return WorkerRole.REGULAR if matches(self._config.selector, pod.labels) else None
        is_prefill = matches(self._config.prefill_selector, pod.labels)
        is_decode = matches(self._config.decode_selector, pod.labels)
        if is_prefill and is_decode:
            self._warnings.warning("pod %s is not used: both selectors match its labels", pod.name)
            return None
        return WorkerRole.PREFILL if is_prefill else WorkerRole.DECODE if is_decode else None

    def _bootstrap_port(self, pod: KubePod) -> int | None:
        """Return the port in the annotation; None: the worker is asked for it."""
        text = pod.annotations.get(self._config.bootstrap_port_annotation)
        if text is None:
            return None
        if text.isdecimal() and len(text) <= 5 and 1 <= int(text) <= 65535:
            return int(text)
        name = self._config.bootstrap_port_annotation
        self._warnings.warning("pod %s: annotation %s is %r, expected a port", pod.name, name, text)
        return None


class PodDiscovery:
    """The watch of one router. `workers` receives what it finds."""

    def __init__(
        self, config: DiscoveryConfig, api: KubeApi, workers: PodWorkers, metrics: RouterMetrics, rng: random.Random
    ) -> None:
        self._config = config
        self._api = api
        self._workers = workers
        self._rng = rng
        self._up = metrics.discovery_up.labels(config.namespace or "")
        self._failures = metrics.discovery_failures.labels(config.namespace or "")
        self._version: str | None = None
        """Resource version at which the next watch begins; None: list first."""
        self._num_failed = 0
        """Calls that failed in a row."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to watch, in the background."""
        self._up.set(0)
        self._task = asyncio.create_task(self._run(), context=no_request())

    async def close(self) -> None:
        """Stop watching. Workers stay."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._api.close()

    async def _run(self) -> None:
        while True:
            try:
                await self._list_and_watch()
            except VersionExpiredError:
                self._version = None
                await self._failed("the resource version has expired", at_once=True)
            except (KubeError, aiohttp.ClientError, OSError, ValueError) as error:
                await self._failed(describe(error) if not isinstance(error, KubeError) else str(error))

    async def _list_and_watch(self) -> None:
        """List if needed, and watch until the API server ends the watch."""
        config = self._config
        if self._version is None:
            pods, self._version = await self._api.list_pods(config.namespace, config.api_selector)
            self._workers.replace(pods)
            self._up.set(1)
        begun, num_events = asyncio.get_running_loop().time(), 0
        events = self._api.watch_pods(config.namespace, config.api_selector, self._version, config.watch_s)
        async for kind, pod, version in events:
            self._up.set(1)
            if kind == OPEN:
                continue
            num_events += 1
            self._num_failed = 0
            if pod is not None:
                if kind == "DELETED":
                    self._workers.gone(pod.uid, "it is deleted")
                else:
                    self._workers.apply(pod)
            self._version = version or self._version
        if not num_events and asyncio.get_running_loop().time() - begun < min(SHORT_WATCH_S, config.watch_s):
            await self._failed("the watch ended at once")
        else:
            self._num_failed = 0

    async def _failed(self, reason: str, *, at_once: bool = False) -> None:
        """Log a failure and wait; `at_once`: the first failure in a row needs no wait."""
        self._failures.inc()
        self._num_failed += 1
        if at_once and self._num_failed == 1:
            log.info("pods are listed again: %s", reason)
            return
        self._up.set(0)
        wait_s = min(self._config.max_backoff_s, self._config.first_backoff_s * 2.0 ** min(self._num_failed - 1, 16))
        wait_s *= 1 + JITTER * self._rng.uniform(-1, 1)
        log.warning("pods cannot be watched, next try in %.1f s: %s", wait_s, reason)
        await asyncio.sleep(wait_s)
