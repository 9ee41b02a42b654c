// <pd-request>: a dialog with one request: id, pair, numbers, and the waterfall of its parts on both servers.

import { el, put } from "./dom.js";
import { bytes, count, seconds, span, tick } from "./format.js";

const ROLES = ["regular", "prefill", "decode"];
const MIN_PERCENT = 0.4;
const host = (url) => url.replace(/^https?:\/\//, "");

/** The parts of one half as [name, begin, seconds], from the arrival of the first half on. The rest after the first token
 * is `generation`. Decode's half of a pair has the times of prefill's steps too; while they run, it waits for KV. */
function partsOf(role, half, began, isPair) {
  const { queue = 0, prefill = 0, transfer = 0, ...own } = half.ttft_parts;
  const isWaiting = isPair && role === "decode";
  const grouped = isWaiting ? { intake: own.intake ?? 0, bootstrap: own.bootstrap ?? 0, "wait for KV": queue + prefill + transfer, delivery: own.delivery ?? 0 } : half.ttft_parts;
  let at = Math.max(0, half.arrived_at - began);
  const parts = Object.entries(grouped).map(([name, value]) => {
    at += value;
    return [name, at - value, value];
  });
  if (role !== "prefill" && half.ttft_s !== null && half.e2e_s !== null && half.e2e_s > half.ttft_s) parts.push(["generation", at, half.e2e_s - half.ttft_s]);
  return parts.filter(([, , value]) => value > 0);
}

class RequestDialog extends HTMLElement {
  connectedCallback() {
    this.heading = el("h2", { id: "request-title" });
    this.facts = el("dl", { class: "facts-list" });
    this.failure = el("p", { class: "why error", hidden: true });
    this.waterfall = el("ol", { class: "waterfall", "aria-label": "Parts of the request" });
    const close = el("button", { type: "button", class: "quiet close", "aria-label": "Close", onclick: () => this.dialog.close() }, "Close");
    const head = el("div", { class: "head" }, this.heading, close);
    this.dialog = el("dialog", { class: "wide", "aria-labelledby": "request-title" }, head, this.facts, this.failure, this.waterfall);
    this.dialog.addEventListener("click", (event) => event.target === this.dialog && this.dialog.close());
    this.append(this.dialog);
  }

  /** Opens the dialog for an entry of `requests` in a snapshot. */
  open(request, now) {
    const halves = ROLES.filter((role) => role in request.halves).map((role) => [role, request.halves[role]]);
    const whole = request.halves.decode ?? request.halves.regular ?? request.halves.prefill;
    this.key = request.key;
    put(this.heading, `${whole.path ?? "Request"}`);
    const error = halves.map(([, half]) => half.error).find(Boolean);
    const facts = [
      ["id", whole.id],
      ["arrived", `${span(now - request.arrived_at)} ago`],
      ["outcome", error ? "failed" : request.halves.prefill && !request.halves.decode && !this.isServer ? "runs at decode" : whole.outcome],
      ...halves.map(([role, half]) => [role === "regular" ? "server" : role, host(half.url)]),
      ["room", whole.room],
      ["prompt", `${count(whole.prompt_tokens)} tokens, ${count((request.halves.prefill ?? whole).cached_tokens)} cached`],
      ["output", `${count(whole.completion_tokens)} tokens`],
      ["TTFT", whole.ttft_s === null ? null : seconds(whole.ttft_s)],
      ["end to end", whole.e2e_s === null ? null : seconds(whole.e2e_s)],
      ["KV moved", whole.kv_bytes === null ? null : bytes(whole.kv_bytes)],
      ["KV writing", whole.kv_transfer_s === null ? null : seconds(whole.kv_transfer_s)],
    ].filter(([, value]) => value !== null && value !== undefined && value !== "");
    this.facts.replaceChildren(...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
    this.failure.hidden = !error;
    put(this.failure, error ?? "");
    this.#showParts(halves, request.arrived_at);
    if (!this.dialog.open) this.dialog.showModal();
  }

  /** Called with every snapshot: the open request may have ended at decode meanwhile. */
  show({ router, requests }) {
    this.isServer = Boolean(router.is_server);
    const found = this.dialog.open && requests.find((one) => one.key === this.key);
    if (found) this.open(found, router.time);
  }

  #showParts(halves, began) {
    const rows = halves.flatMap(([role, half]) => partsOf(role, half, began, halves.length > 1).map((part) => [role, ...part]));
    const whole = Math.max(1e-6, ...rows.map(([, , at, value]) => at + value));
    const ticks = el("div", { class: "ticks", "aria-hidden": "true" }, ...[0, 1, 2, 3, 4].map((step) => el("span", {}, step ? tick((whole * step) / 4) : "0")));
    const nodes = rows.map(([role, name, at, value]) => {
      const bar = el("i", { class: `part-${name.replaceAll(" ", "-")}` });
      bar.style.marginLeft = `${(100 * at) / whole}%`;
      bar.style.width = `${Math.max(MIN_PERCENT, (100 * value) / whole)}%`;
      const text = role === "regular" ? name : `${role} · ${name}`;
      return el("li", { title: `${text}: from ${seconds(at)} for ${seconds(value)}` }, el("span", {}, text), el("div", { class: "track" }, bar), el("b", {}, seconds(value)));
    });
    this.waterfall.replaceChildren(el("li", { class: "axis" }, el("span"), ticks, el("b")), ...nodes);
    this.waterfall.hidden = rows.length === 0;
  }
}

customElements.define("pd-request", RequestDialog);
