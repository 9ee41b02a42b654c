// <pd-worker>: the card of one server: its state, its queues in the order in which requests pass them, its KV pages.

import { Keyed, el, mark, put } from "./dom.js";
import { count, percent, seconds, speed } from "./format.js";

const QUEUES = {
  num_grammar_queue_reqs: ["grammar", "Wait for the compilation of their grammar"],
  num_prefill_bootstrap_queue_reqs: ["bootstrap", "Wait for decode's page list"],
  num_decode_prealloc_queue_reqs: ["prealloc", "Wait for KV pages for their prompt"],
  num_decode_transfer_queue_reqs: ["transfer", "Wait for prefill or for the KV transfer"],
  num_queue_reqs: ["waiting", "Wait to be scheduled"],
  num_running_reqs: ["running", "In the model's batch"],
  num_prefill_inflight_queue_reqs: ["sending", "Prefill done; KV transfer in flight"],
  num_retracted_reqs: ["retracted", "Retracted (preempted); wait to resume"],
};
const RARE = ["num_grammar_queue_reqs", "num_retracted_reqs"];
/** States of KV pages: displayed name and explanation. */
export const PAGES = {
  leased: ["private", "Pages of a single request"],
  locked: ["shared", "Pages of the prefix cache that requests use"],
  evictable: ["cached", "Unused pages of the prefix cache; evicted when needed"],
  free: ["free", "Free pages"],
};
const OLD_S = 2.5;
const BREAKERS = { open: "breaker open", half_open: "breaker half open" };

/** The state of a worker: [state, text, reason]. */
function stateOf(worker, { dead, all, error }) {
  const { observed } = worker;
  const ill = observed.replicas.find((one) => one.trouble !== null || one.silent || !one.alive);
  if (!worker.is_healthy) return ["down", "down", worker.last_error];
  if (worker.breaker === "open") return ["down", BREAKERS.open, "Its circuit breaker is open after repeated failures; it gets no requests"];
  if (dead.length && dead.length === all) return ["down", "not ready", `No token comes through with ${dead.join(", ") || "it"}${error ? `: ${error}` : ""}`];
  if (ill) return ["warn", "unhealthy replica", ill.trouble ?? `replica ${ill.dp_rank} is silent`];
  if (dead.length) return ["warn", "pair not ready", `No token comes through with ${dead.join(", ")}`];
  if (worker.draining) return ["warn", "draining", drained(worker)];
  if (worker.breaker === "half_open") return ["warn", BREAKERS.half_open, "A few requests test whether it works again"];
  if (observed.server?.status === "not_ready") return ["warn", "not ready", observed.server.trouble];
  if (observed.error !== null) return ["warn", "no details", observed.error];
  return ["ok", "healthy", null];
}

/** What a draining worker does. */
function drained(worker) {
  const parts = ["It gets no new requests"];
  if (worker.num_moving) parts.push(`${count(worker.num_moving)} move to other servers`);
  if (worker.num_moved_away) parts.push(`${count(worker.num_moved_away)} have moved`);
  return parts.join("; ");
}

function addUp(replicas, of) {
  const total = {};
  for (const one of replicas) for (const [name, value] of Object.entries(of(one.state))) total[name] = (total[name] ?? 0) + value;
  return total;
}

class Worker extends HTMLElement {
  connectedCallback() {
    if (this.badge) return;
    this.label = el("h4");
    this.address = el("code");
    this.badge = el("span", { class: "badge" });
    this.why = el("p", { class: "why" });
    this.stages = el("ol", { class: "queues", "aria-label": "Requests by queue" });
    this.used = el("span");
    this.caption = el("p", { class: "caption" }, el("span", {}, "KV pages"), this.used);
    this.bars = el("div", { class: "bars" });
    this.legend = el("ul", { class: "legend", "aria-label": "KV pages by state" });
    this.facts = el("p", { class: "facts muted" });
    this.manage = el("button", { type: "button", class: "quiet manage", onclick: () => document.querySelector("pd-admin").open(this.worker.id, this.label.textContent) }, "Manage");
    const title = el("div", { class: "title" }, this.label, this.address);
    this.append(el("div", { class: "head" }, title, this.badge, this.manage), this.why, this.stages, this.caption, this.bars, this.legend, this.facts);
    this.queueNodes = new Keyed(this.stages);
    this.barNodes = new Keyed(this.bars);
    this.pageNodes = new Keyed(this.legend);
  }

  /** Called with every snapshot. `pairs`: `all`, the number of its pairs, `dead`, the partners in pairs that are down, `error` of the first. */
  show(worker, label, pairs) {
    const [state, text, why] = stateOf(worker, pairs);
    this.worker = worker;
    this.manage.hidden = !worker.id;
    mark(this, "data-state", state);
    mark(this.badge, "data-state", state);
    put(this.badge, text);
    put(this.label, label);
    put(this.address, worker.url.replace(/^https?:\/\//, ""));
    mark(this.address, "title", worker.url);
    put(this.why, why ?? "");
    this.why.hidden = !why;
    mark(this.why, "title", why);
    const replicas = worker.observed.replicas.filter((one) => one.state !== null);
    this.#showQueues(addUp(replicas, (one) => one.queues));
    this.#showPages(replicas);
    this.#showFacts(worker, replicas);
  }

  #showQueues(queues) {
    const rank = (name) => (name in QUEUES ? Object.keys(QUEUES).indexOf(name) : 99);
    const shown = (name) => queues[name] > 0 || !RARE.includes(name);
    const names = Object.keys(queues).filter(shown).sort((a, b) => rank(a) - rank(b));
    const make = (name) => el("li", { title: QUEUES[name]?.[1] ?? name }, el("b", { "data-field": name }), el("span", {}, QUEUES[name]?.[0] ?? name));
    this.queueNodes.show(names, (name) => name, make, (node, name) => {
      put(node.firstChild, count(queues[name]));
      node.classList.toggle("busy", queues[name] > 0);
    });
  }

  #showPages(replicas) {
    const bar = () => el("div", { class: "bar" }, ...Object.keys(PAGES).map((name) => el("i", { class: `page-${name}` })));
    this.barNodes.show(replicas, (one) => one.dp_rank, bar, (node, { dp_rank: rank, state: { pages } }) => {
      Object.keys(PAGES).forEach((name, index) => {
        const part = node.children[index];
        part.style.width = `${pages.total ? (100 * pages[name]) / pages.total : 0}%`;
        mark(part, "title", `${replicas.length > 1 ? `replica ${rank}: ` : ""}${count(pages[name])} of ${count(pages.total)} pages ${PAGES[name][0]}`);
      });
    });
    const total = addUp(replicas, (one) => one.pages);
    this.caption.hidden = replicas.length === 0;
    put(this.used, total.total ? `${percent((total.leased + total.locked) / total.total)} of ${count(total.total)} in use` : "");
    const make = (name) => el("li", { title: PAGES[name][1] }, el("i", { class: `page-${name}` }), el("b", { "data-field": `pages_${name}` }), el("span", {}, PAGES[name][0]));
    this.pageNodes.show(replicas.length ? Object.keys(PAGES) : [], (name) => name, make, (node, name) => put(node.children[1], count(total[name])));
  }

  #showFacts(worker, replicas) {
    const { rates } = worker.observed;
    const facts = [`${count(worker.load)} in flight`];
    if (rates !== null && worker.worker_type !== "prefill") facts.push(`${speed(rates.generation_tokens_per_s)} tok/s`);
    if (rates?.spec_accept_length > 0) facts.push(`accept length ${rates.spec_accept_length.toFixed(2)}`);
    if (rates !== null && worker.worker_type !== "decode") facts.push(`${percent(rates.cache_hit_rate)} cache hits`);
    const old = (worker.observed.age_s ?? 0) + (worker.observed.server?.state_age_s ?? 0);
    if (old >= OLD_S) facts.push(`data is ${seconds(old)} old`);
    const held = replicas.reduce((all, { state }) => all + state.pages_held.remote + state.pages_held.send, 0);
    if (held) facts.push(`${count(held)} pages held for peers`);
    const turn = Math.max(0, ...worker.observed.replicas.map((one) => one.turn_s ?? 0));
    if (turn >= 2) facts.push(`in a step for ${seconds(turn)}`);
    const host = replicas.filter(({ state }) => state.tiers?.host_max);
    if (host.length) facts.push(`host tier ${percent(host.reduce((all, { state }) => all + state.tiers.host_used, 0) / host.reduce((all, { state }) => all + state.tiers.host_max, 0))}`);
    if (replicas[0]?.state.tiers?.store) facts.push(`store ${replicas[0].state.tiers.store}`);
    const backend = replicas[0]?.state.transfer_backend;
    if (backend && worker.worker_type !== "regular") facts.push(backend);
    put(this.facts, facts.join(" · "));
    mark(this.facts, "title", facts.join("\n"));
  }
}

customElements.define("pd-worker", Worker);
