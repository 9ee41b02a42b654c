"""Flags of sglang-router 0.3 that this router does not support; they are reported as such, not as unknown. Data only.

Used by `flags`; a test checks that supported flags are not in this list.
"""

from __future__ import annotations

_ABSENT = "this router does not have this feature"
_KUBERNETES = "list workers with --prefill and --decode, or add them with POST /workers"
_TOKENIZER = "the workers tokenize text"
_STORE = "answers are not stored"
_AUTH = "use --api-key and --admin-api-key"

UNSUPPORTED: dict[str, str] = {
    "assignment-mode": "--policy consistent_hashing keeps a conversation on its worker",
    "backend": "workers speak SGLang's protocol",
    "bootstrap-port-annotation": _KUBERNETES,
    "chat-template": _TOKENIZER,
    "control-plane-api-keys": _AUTH,
    "control-plane-audit-enabled": _AUTH,
    "dp-aware": "a worker spreads requests over its own replicas",
    "enable-igw": _ABSENT,
    "history-backend": _STORE,
    "jwt-audience": _AUTH,
    "jwt-issuer": _AUTH,
    "jwt-jwks-uri": _AUTH,
    "jwt-role-mapping": _AUTH,
    "log-dir": "logs go to stderr",
    "max-idle-secs": "--policy consistent_hashing keeps no table of conversations",
    "mcp-config-path": _ABSENT,
    "mini-lb": "this router has one implementation only",
    "model-path": _TOKENIZER,
    "oracle-connect-descriptor": _STORE,
    "oracle-password": _STORE,
    "oracle-pool-max": _STORE,
    "oracle-pool-min": _STORE,
    "oracle-pool-timeout-secs": _STORE,
    "oracle-tns-alias": _STORE,
    "oracle-username": _STORE,
    "oracle-wallet-path": _STORE,
    "postgres-db-url": _STORE,
    "postgres-pool-max": _STORE,
    "prefill-selector": _KUBERNETES,
    "decode-selector": _KUBERNETES,
    "prometheus-duration-buckets": "the buckets are fixed",
    "prometheus-host": "metrics are at /metrics of the router's own port",
    "prometheus-port": "metrics are at /metrics of the router's own port",
    "rate-limit-tokens-per-second": "use --max-concurrent-requests and --max-inflight",
    "reasoning-parser": "it is a flag of the workers",
    "redis-pool-max": _STORE,
    "redis-retention-days": _STORE,
    "redis-url": _STORE,
    "selector": _KUBERNETES,
    "service-discovery": _KUBERNETES,
    "service-discovery-namespace": _KUBERNETES,
    "service-discovery-port": _KUBERNETES,
    "tokenizer-cache-enable-l0": _TOKENIZER,
    "tokenizer-cache-enable-l1": _TOKENIZER,
    "tokenizer-cache-l0-max-entries": _TOKENIZER,
    "tokenizer-cache-l1-max-memory": _TOKENIZER,
    "tokenizer-path": _TOKENIZER,
    "tool-call-parser": "it is a flag of the workers",
    "worker-startup-check-interval": "workers are checked every half second until they are healthy",
    "worker-startup-timeout-secs": "the router starts without its workers, and uses each as soon as it is healthy",
}
"""The alternative by flag name, without leading dashes."""
