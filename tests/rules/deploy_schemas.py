"""JSON schemas of the custom resources in `configs/k8s`: the fields we use, and no others, so that a typo is an error.

Sources: LeaderWorkerSet leaderworkerset.x-k8s.io/v1 of LWS v0.9.0; PodMonitor monitoring.coreos.com/v1 of the
Prometheus Operator v0.91.0; ScaledObject keda.sh/v1alpha1 of KEDA v2.22 with its Prometheus scaler.
A pod template's `spec` is not described here: the tests check it as a Pod.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def fields(*required: str, **properties: Schema) -> Schema:
    """An object with these fields and no others."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 1_000_000}
COUNT_OR_PERCENT: Schema = {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^[0-9]+%$"}]}
DURATION: Schema = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h))+$"}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}
METADATA: Schema = fields("name", name=TEXT, namespace=TEXT, labels=LABELS, annotations=LABELS)
TEMPLATE: Schema = fields("spec", metadata=fields(labels=LABELS, annotations=LABELS), spec={"type": "object"})
EXPRESSION: Schema = fields(
    "key",
    "operator",
    key=TEXT,
    operator={"enum": ["In", "NotIn", "Exists", "DoesNotExist"]},
    values={"type": "array", "items": TEXT},
)


def resource(api_version: str, kind: str, spec: Schema) -> Schema:
    """A custom resource of one version and kind."""
    head = {"apiVersion": {"const": api_version}, "kind": {"const": kind}, "metadata": METADATA}
    return fields(*head, "spec", **head, spec=spec)


LEADER_WORKER_SET: Schema = resource(
    "leaderworkerset.x-k8s.io/v1",
    "LeaderWorkerSet",
    fields(
        "leaderWorkerTemplate",
        replicas=COUNT,
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        networkConfig=fields("subdomainPolicy", subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
        rolloutStrategy=fields(
            "type",
            type={"const": "RollingUpdate"},
            rollingUpdateConfiguration=fields(
                maxUnavailable=COUNT_OR_PERCENT, maxSurge=COUNT_OR_PERCENT, partition=COUNT
            ),
        ),
        leaderWorkerTemplate=fields(
            "workerTemplate",
            size={"type": "integer", "minimum": 1},
            restartPolicy={"enum": ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
            leaderTemplate=TEMPLATE,
            workerTemplate=TEMPLATE,
        ),
    ),
)

POD_MONITOR: Schema = resource(
    "monitoring.coreos.com/v1",
    "PodMonitor",
    fields(
        "selector",
        selector=fields(matchLabels=LABELS, matchExpressions={"type": "array", "items": EXPRESSION}),
        podTargetLabels={"type": "array", "items": TEXT},
        podMetricsEndpoints={
            "type": "array",
            "items": fields(port=TEXT, path=TEXT, interval=DURATION, scrapeTimeout=DURATION),
        },
    ),
)

NUMBER_TEXT: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"}
BOOL_TEXT: Schema = {"enum": ["true", "false"]}
SCALING_RULES: Schema = fields(
    stabilizationWindowSeconds=COUNT,
    policies={
        "type": "array",
        "items": fields(
            "type", "value", "periodSeconds", type={"enum": ["Pods", "Percent"]}, value=COUNT, periodSeconds=COUNT
        ),
    },
)

SCALED_OBJECT: Schema = resource(
    "keda.sh/v1alpha1",
    "ScaledObject",
    fields(
        "scaleTargetRef",
        "triggers",
        scaleTargetRef=fields("name", apiVersion=TEXT, kind=TEXT, name=TEXT),
        minReplicaCount=COUNT,
        maxReplicaCount=COUNT,
        pollingInterval=COUNT,
        cooldownPeriod=COUNT,
        advanced=fields(
            horizontalPodAutoscalerConfig=fields(behavior=fields(scaleUp=SCALING_RULES, scaleDown=SCALING_RULES))
        ),
        triggers={
            "type": "array",
            "minItems": 1,
            "items": fields(
                "type",
                "metadata",
                type={"const": "prometheus"},
                metricType={"enum": ["AverageValue", "Value"]},
                metadata=fields(
                    *("serverAddress", "query", "threshold"),
                    serverAddress={"type": "string", "pattern": "^https?://"},
                    query=TEXT,
                    threshold=NUMBER_TEXT,
                    activationThreshold=NUMBER_TEXT,
                    ignoreNullValues=BOOL_TEXT,
                ),
            ),
        },
    ),
)

CUSTOM: dict[str, Schema] = {
    "LeaderWorkerSet": LEADER_WORKER_SET,
    "PodMonitor": POD_MONITOR,
    "ScaledObject": SCALED_OBJECT,
}
