"""The configuration of Kubernetes service discovery, its flags, and label selectors. Made by `flags`.

Flag names and defaults are those of SGLang's router (`--service-discovery`, `sglang_router.router_args`). The flag
`--service-discovery-api` is this router's own.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from pdserve.errors import ConfigError

Labels = tuple[tuple[str, str], ...]
"""Labels that a pod must have, as sorted pairs of key and value."""

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes mounts a pod's token and the API server's CA certificate."""
FLAGS = (
    *("selector", "prefill_selector", "decode_selector", "service_discovery_port", "service_discovery_namespace"),
    *("bootstrap_port_annotation", "service_discovery_api"),
)
"""Flags that need `--service-discovery`."""
_NAME = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_KEY = re.compile(rf"([a-z0-9]([a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_NAME}")
_VALUE = re.compile(rf"({_NAME})?")
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiscoveryConfig:
    """Which pods are workers. Times in seconds.

    Raises:
        ConfigError: a value is invalid; names the flag.
    """

    pd: bool
    """True: prefill and decode workers by their selectors; False: regular workers by `selector`."""
    selector: Labels = ()
    prefill_selector: Labels = ()
    decode_selector: Labels = ()
    port: int = 80
    """HTTP port of every worker."""
    namespace: str | None = None
    """None: the pods of all namespaces."""
    bootstrap_port_annotation: str = "sglang.ai/bootstrap-port"
    """Annotation with a prefill pod's bootstrap port; without it the worker is asked for the port."""
    api_url: str | None = None
    """None: the API server of the cluster in which the router runs, with the pod's service account."""
    account_dir: Path = SERVICE_ACCOUNT
    watch_s: float = 300.0
    """Duration of one watch call, after which the API server ends it and the router opens the next one."""
    first_backoff_s: float = 0.5
    max_backoff_s: float = 30.0

    @property
    def api_selector(self) -> str:
        """The `labelSelector` of list and watch calls; it admits at least all pods that some selector matches."""
        given = [self.prefill_selector, self.decode_selector] if self.pd else [self.selector]
        return combined_selector([labels for labels in given if labels])

    def __post_init__(self) -> None:
        """Check all values."""
        if self.pd and self.selector:
            text = "--selector is for regular servers; with --pd-disaggregation give --prefill-selector instead"
            raise ConfigError(text, field="selector")
        if not self.pd and (self.prefill_selector or self.decode_selector):
            text = "--prefill-selector and --decode-selector need --pd-disaggregation; use --selector"
            raise ConfigError(text, field="pd_disaggregation")
        if self.pd and not (self.prefill_selector or self.decode_selector):
            text = "--service-discovery with --pd-disaggregation needs --prefill-selector and --decode-selector"
            raise ConfigError(text, field="prefill_selector")
        if not self.pd and not self.selector:
            raise ConfigError("--service-discovery needs --selector KEY=VALUE ...", field="selector")
        if self.prefill_selector == self.decode_selector and self.pd:
            text = "--prefill-selector and --decode-selector are equal, so no pod would have one role"
            raise ConfigError(text, field="decode_selector")
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"--service-discovery-port must be 1 to 65535, got {self.port}", field="port")
        if self.namespace is not None and not _NAMESPACE.fullmatch(self.namespace):
            text = f"--service-discovery-namespace {self.namespace!r} is not a name of a namespace"
            raise ConfigError(text, field="service_discovery_namespace")
        if not _KEY.fullmatch(self.bootstrap_port_annotation):
            text = f"--bootstrap-port-annotation {self.bootstrap_port_annotation!r} is not a name of an annotation"
            raise ConfigError(text, field="bootstrap_port_annotation")
        if self.api_url is not None and not _is_base_url(self.api_url):
            text = f"--service-discovery-api needs a URL such as http://127.0.0.1:8001, got {self.api_url!r}"
            raise ConfigError(text, field="service_discovery_api")


def parse_selector(values: Iterable[str], flag: str) -> Labels:
    """Parse `KEY=VALUE` words, also several in one word, separated by spaces or commas.

    Raises:
        ConfigError: a word has no `=`, is not a valid label, or repeats a key with another value.
    """
    found: dict[str, str] = {}
    for word in [word for value in values for word in re.split(r"[\s,]+", value) if word]:
        key, equals, value = word.partition("=")
        if not equals or not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
            raise ConfigError(f"{flag} needs labels KEY=VALUE, got {word!r}", field=_field(flag))
        if found.setdefault(key, value) != value:
            raise ConfigError(f"{flag} has two values of {key}: {found[key]!r}, {value!r}", field=_field(flag))
    return tuple(sorted(found.items()))


def matches(selector: Labels, labels: Mapping[str, str]) -> bool:
    """Whether a pod with these labels is selected. An empty selector selects nothing."""
    return bool(selector) and all(labels.get(key) == value for key, value in selector)


def combined_selector(selectors: Sequence[Labels]) -> str:
    """Return a Kubernetes label selector that admits every pod that at least one of `selectors` matches.

    Kubernetes has no "or" between selectors, so keys that only some selectors have are left out.
    """
    parts = []
    for key in sorted(set.intersection(*({key for key, _ in labels} for labels in selectors))):
        values = sorted({dict(labels)[key] for labels in selectors})
        if len(values) == 1:
            parts.append(f"{key}={values[0]}")
        else:
            parts.append(f"{key} in ({','.join(values)})" if all(values) else key)
    return ",".join(parts)


def add_discovery_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags to an argument group."""
    add, own = group.add_argument, DiscoveryConfig(pd=False, selector=(("a", "b"),))
    add("--service-discovery", action="store_true", help="find workers through the Kubernetes API, by labels of pods")
    label = "KEY=VALUE"
    add("--selector", nargs="+", default=[], metavar=label, help="labels of the pods of regular servers")
    add("--prefill-selector", nargs="+", default=[], metavar=label, help="labels of the pods of prefill servers")
    add("--decode-selector", nargs="+", default=[], metavar=label, help="labels of the pods of decode servers")
    text = f"HTTP port of the servers in pods; {own.port} when absent"
    add("--service-discovery-port", type=int, default=None, metavar="PORT", help=text)
    text = "namespace of the pods; all namespaces when absent, which needs a ClusterRole"
    add("--service-discovery-namespace", metavar="NAME", help=text)
    text = "annotation with a prefill pod's bootstrap port; without the annotation the server is asked for its port. "
    text += f"{own.bootstrap_port_annotation} when absent"
    add("--bootstrap-port-annotation", default=None, metavar="NAME", help=text)
    text = "URL of the Kubernetes API, such as that of kubectl proxy; when absent that of the router's own cluster, "
    text += "with the service account of its pod"
    add("--service-discovery-api", metavar="URL", help=text)


def discovery_from(args: argparse.Namespace) -> DiscoveryConfig | None:
    """Read the flags; None: no discovery. `ConfigError` names an invalid flag, or one without `--service-discovery`."""
    given = [name for name in FLAGS if getattr(args, name) not in (None, [])]
    if not args.service_discovery:
        if given:
            raise ConfigError(f"--{given[0].replace('_', '-')} needs --service-discovery", field=given[0])
        return None
    optional = {"port": args.service_discovery_port, "bootstrap_port_annotation": args.bootstrap_port_annotation}
    return DiscoveryConfig(
        pd=args.pd_disaggregation,
        selector=parse_selector(args.selector, "--selector"),
        prefill_selector=parse_selector(args.prefill_selector, "--prefill-selector"),
        decode_selector=parse_selector(args.decode_selector, "--decode-selector"),
        namespace=args.service_discovery_namespace,
        api_url=args.service_discovery_api,
        **{name: value for name, value in optional.items() if value is not None},
    )


def _field(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _is_base_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not parts.query
    except ValueError:
        return False
