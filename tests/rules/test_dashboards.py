"""The dashboard and the alerts name metrics that are really exported, and labels that these really have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from pdserve.config.groups import DisaggConfig, DisaggMode, ModelConfig, ServerConfig
from pdserve.config.schedule_group import ScheduleConfig
from pdserve.observe.metrics import RequestRecord
from pdserve.protocol.engine_state import EngineState, Flow, PeerLoad
from pdserve.protocol.messages import GenerateRequest, RequestTiming
from pdserve.protocol.replicas import merge_states
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.router.config.config import RouterConfig, WorkerRole, WorkerSpec
from pdserve.server.app import make_metrics
from pdserve.transfer.peers import SessionTimes

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "configs" / "grafana" / "pdserve.json"
ALERTS = ROOT / "configs" / "prometheus" / "alerts.yml"
SCALED = ROOT / "configs" / "k8s" / "components" / "keda" / "scaled-objects.yaml"
METRIC = re.compile(r"\b(?:sglang:|pdserve:|pdserve_router_)\w+")
SELECTOR = re.compile(r"((?:sglang:|pdserve:|pdserve_router_)\w+)\{([^}]*)\}")
GROUPING = re.compile(r"\b(?:by|on) ?\(([^)]+)\)")
LEGEND = re.compile(r"{{ *(\w+) *}}")
OF_PROMETHEUS = {"instance", "job", "le", "namespace"}


def busy_state() -> EngineState:
    flow = Flow(bytes=1, transfers=1, failures=1, write_s=1.0, in_flight=1, recent_bytes_s=1.0)
    peer = PeerLoad(endpoint="p", instance="i", state="ready", heartbeat_age_s=1.0, sent=flow, received=flow)
    names = ("pages_total", "pages_free", "pages_cached", "pages_evictable", "pages_held_remote", "pages_held_send")
    return EngineState(
        queues={"num_running_reqs": 1},
        memory=dict.fromkeys(names, 1),
        counters={"spec_accepted_at.1": 1.0},
        facts={"spec_is_drafting": 1.0, "spec_draft_length": 1.0},
        num_running_reqs=1,
        num_queue_reqs=1,
        num_used_tokens=1,
        max_total_tokens=2,
        failures={"peer_gone": 1},
        peers=[peer],
    )


def exported_by_server(mode: DisaggMode) -> str:
    """What `/metrics` has after one request; two replicas and priorities, so that all labels exist."""
    config = ServerConfig(
        model=ModelConfig(model_path="m"),
        disagg=DisaggConfig(disaggregation_mode=mode),
        schedule=ScheduleConfig(enable_priority_scheduling=True),
    )
    metrics = make_metrics(config)
    timing = RequestTiming(queue_s=1.0, bootstrap_s=1.0, prefill_s=1.0, transfer_s=1.0, kv_bytes=9, kv_transfer_s=1.0)
    request = GenerateRequest(rid="k", input_ids=[1], sampling=CoreSamplingParams())
    record = RequestRecord(
        request=request, name="r", path="/generate", outcome="stop", ttft_s=4.0, e2e_s=5.0, completion_tokens=1,
        timing=timing,
    )  # fmt: skip
    metrics.started(record)
    metrics.first_token(record)
    metrics.prompt_done(record, 1, 0, None)
    metrics.next_tokens(record, 0.1, 1)
    metrics.generated(record, 1)
    metrics.ended(record)
    return metrics.render(merge_states([busy_state(), busy_state()]), {0: True, 1: True}).decode()


async def exported_by_router() -> str:
    import aiohttp
    from aiohttp import web

    from pdserve.router.app import make_app

    dead = "http://127.0.0.1:1"
    specs = (
        WorkerSpec(role=WorkerRole.PREFILL, url=dead),
        WorkerSpec(role=WorkerRole.DECODE, url="http://127.0.0.1:2"),
    )
    runner = web.AppRunner(make_app(RouterConfig(pd=True, workers=specs)))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{url}/generate", json={"text": "x"}) as answer:
                assert answer.status == 503
            async with session.get(f"{url}/metrics") as answer:
                return await answer.text()
    finally:
        await runner.cleanup()


async def exported_by_all() -> dict[str, set[str]]:
    """Labels of every sample, and of every family without a sample yet, by name."""
    texts = [exported_by_server(mode) for mode in ("null", "prefill", "decode")]
    texts.append(await exported_by_router())
    found: dict[str, set[str]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            found.setdefault(family.name if family.type != "counter" else f"{family.name}_total", set())
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions() -> list[tuple[str, str]]:
    """Where each is, and what it says."""
    dashboard = json.loads(DASHBOARD.read_text())
    found = [(panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel.get("targets", [])]
    found += [(v["name"], v["definition"]) for v in dashboard["templating"]["list"] if "definition" in v]
    rules = yaml.safe_load(ALERTS.read_text())["groups"]
    found += [(rule["alert"], rule["expr"]) for group in rules for rule in group["rules"]]
    for document in yaml.safe_load_all(SCALED.read_text()):
        where = f"KEDA {document['metadata']['name']}"
        found += [(where, trigger["metadata"]["query"]) for trigger in document["spec"]["triggers"]]
    return found


def legends() -> list[tuple[str, str, set[str]]]:
    """Where each is, the expression that it names the lines of, and the labels that it shows."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    targets = [(panel["title"], one) for panel in panels for one in panel.get("targets", [])]
    return [(where, one["expr"], set(LEGEND.findall(one.get("legendFormat", "")))) for where, one in targets]


async def test_every_metric_and_label_that_is_named_is_exported() -> None:
    exported = await exported_by_all()
    unknown = {(where, name) for where, text in expressions() for name in METRIC.findall(text) if name not in exported}
    assert not unknown
    mute = [(where, text) for where, text in expressions() if not METRIC.search(text)]
    assert mute == [("PdserveDown", 'up{job=~"pdserve.*"} == 0')], "a name that is none of ours would be none of these"
    for where, text in expressions():
        for name, selectors in SELECTOR.findall(text):
            labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", re.sub(r'"[^"]*"', "", selectors)))
            assert labels <= exported[name] | OF_PROMETHEUS, (where, name, labels - exported[name])
        grouped = {label.strip() for found in GROUPING.findall(text) for label in found.split(",") if label.strip()}
        known = set().union(*(exported[name] for name in METRIC.findall(text)), OF_PROMETHEUS)
        assert grouped <= known, (where, grouped - known)
    for where, text, labels in legends():
        kept = {label.strip() for found in GROUPING.findall(text) for label in found.split(",")} - {"le"}
        known = set().union(*(exported[name] for name in METRIC.findall(text)), {"instance"})
        assert labels <= (kept or known), (where, labels, kept or known)


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert {v["name"] for v in dashboard["templating"]["list"]} == {"datasource", "model", "role", "instance"}
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        if panel["type"] != "row":
            assert panel["description"] and panel["targets"], panel["title"]
            for target in panel["targets"]:
                assert target["expr"].count("(") == target["expr"].count(")"), target["expr"]


def test_alerts_of_silent_peers_fire_before_the_session_ends() -> None:
    scrape_s = float(yaml.safe_load((ALERTS.parent / "prometheus.yml").read_text())["global"]["scrape_interval"][:-1])
    times, said = SessionTimes(), dict(expressions())
    silent_after_s = times.heartbeat_s * times.misses
    for alert, ends_after_s in (
        ("PdservePeerSilentForLong", times.silent_timeout_s),
        ("PdservePeerSilent", silent_after_s + times.silent_timeout_s),
    ):
        threshold_s = float(said[alert].rpartition(">")[2])
        assert silent_after_s < threshold_s <= ends_after_s - scrape_s, alert
        assert "max_over_time(" in said[alert], "what one scrape has seen is not overlooked"


def test_alerts_say_what_is_wrong_and_how_bad() -> None:
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical") and rule["annotations"]["summary"]
    scrapes = yaml.safe_load((ALERTS.parent / "prometheus.yml").read_text())
    assert scrapes["rule_files"] == [ALERTS.name]
