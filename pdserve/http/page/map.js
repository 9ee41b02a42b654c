// <pd-map>: prefill servers on the left, decode servers on the right, and the KV transfers between them. On narrow screens
// a list replaces the lines.

import { Keyed, el, mark, put, svg } from "./dom.js";
import { bytes, count, rate } from "./format.js";
import { PAGES } from "./worker.js";

const MANY_EDGES = 6;
const MANY_SERVERS = 3;
const NAMES = { prefill: "Prefill", decode: "Decode", regular: "Server" };
const ONE = { prefill: "computes prompts", decode: "generates answers", regular: "prefill and decode" };
const HINTS = { prefill: "compute prompts", decode: "generate answers", regular: "prefill and decode" };

/** Merges the edges between the same two servers, which have one edge for each pair of replicas. */
function byServers(edges) {
  const found = new Map();
  for (const edge of edges) {
    if (edge.from_url === null || edge.to_url === null) continue;
    const key = `${edge.from_url} ${edge.to_url}`;
    const known = found.get(key);
    if (known === undefined) {
      found.set(key, { ...edge, key });
      continue;
    }
    for (const name of ["in_flight", "gb_per_s", "bytes", "transfers", "failures"]) known[name] += edge[name];
    known.gb_per_s_writing = Math.max(known.gb_per_s_writing ?? 0, edge.gb_per_s_writing ?? 0) || null;
    if (edge.peer_state !== "ready") known.peer_state = edge.peer_state;
  }
  return [...found.values()];
}

function details(edge, names) {
  const lines = [`${names.get(edge.from_url)} → ${names.get(edge.to_url)}: ${rate(edge.gb_per_s)} over the last 5 s`];
  if (edge.gb_per_s_writing !== null) lines.push(`${rate(edge.gb_per_s_writing)} during transfers`);
  lines.push(`${count(edge.in_flight)} in flight, ${count(edge.transfers)} done, ${bytes(edge.bytes)} in total`);
  if (edge.failures) lines.push(`${count(edge.failures)} failed`);
  if (edge.peer_state !== "ready") lines.push(`the peer is ${edge.peer_state}`);
  return lines.join("\n");
}

class Deployment extends HTMLElement {
  connectedCallback() {
    this.cards = new Map();
    this.edges = [];
    this.pools = Object.fromEntries(
      Object.keys(NAMES).map((role) => {
        const list = el("div", { class: "cards" });
        const hint = el("small");
        const key = el("ul", { class: "legend key" }, ...Object.entries(PAGES).map(([name, [text, what]]) => el("li", { title: what }, el("i", { class: `page-${name}` }), text)));
        const none = el("p", { class: "muted none", hidden: true }, "No server yet. Add one with POST /workers.");
        const box = el("section", { class: "pool", "data-role": role, hidden: true, "aria-label": NAMES[role] }, el("h3", {}, NAMES[role], " ", hint), key, none, list);
        return [role, { box, hint, none, nodes: new Keyed(list) }];
      }),
    );
    this.lines = svg("svg", { "aria-hidden": true });
    this.labels = el("ul", { class: "edges", "aria-label": "KV transfers" });
    this.more = el("p", { class: "more muted", hidden: true });
    this.wires = el("div", { class: "wires" }, this.lines, this.labels, this.more);
    this.lineNodes = new Keyed(this.lines);
    this.labelNodes = new Keyed(this.labels);
    this.append(this.pools.prefill.box, this.wires, this.pools.decode.box, this.pools.regular.box);
    new ResizeObserver(() => this.#draw()).observe(this);
  }

  /** Called with every snapshot. */
  show({ router, workers, edges, pairs }) {
    const names = new Map();
    this.healthy = new Set(workers.filter((one) => one.is_healthy).map((one) => one.url));
    const isPd = router.pd && !router.is_server;
    this.classList.toggle("pd", isPd);
    this.dead = new Map(pairs.filter((one) => !one.serving).map((one) => [`${one.prefill} ${one.decode}`, one.error]));
    const places = [];
    for (const [role, pool] of Object.entries(this.pools)) {
      const own = workers.filter((one) => one.worker_type === role);
      pool.box.hidden = router.is_server ? own.length === 0 : router.pd === (role === "regular");
      pool.box.classList.toggle("dense", own.length > MANY_SERVERS);
      pool.none.hidden = own.length > 0;
      put(pool.hint, own.length > 1 ? `${own.length} ${HINTS[role]}` : own.length ? ONE[role] : "");
      own.forEach((one, index) => names.set(one.url, `${NAMES[role]} ${index + 1}`));
      pool.nodes.show(own, (one) => one.id, () => el("pd-worker", { "data-role": role }), (node, one) => {
        this.cards.set(one.url, node);
        places.push([node, one]);
      });
    }
    for (const [node, one] of places) {
      const own = pairs.filter((pair) => [pair.prefill, pair.decode].includes(one.url));
      const partner = (pair) => names.get(pair.decode === one.url ? (pair.prefill ?? one.url) : pair.decode);
      const dead = own.filter((pair) => !pair.serving);
      node.show(one, names.get(one.url), { all: own.length, dead: dead.map(partner), error: dead[0]?.error });
    }
    this.wires.hidden = !isPd;
    const known = byServers(edges).filter((edge) => names.has(edge.from_url) && names.has(edge.to_url));
    const order = (edge) => `${names.get(edge.from_url)} ${names.get(edge.to_url)}`;
    this.edges = known.sort((a, b) => order(a).localeCompare(order(b), "en", { numeric: true }));
    this.#showEdges(names);
    this.#draw();
  }

  #showEdges(names) {
    const make = () => el("li", {}, el("span", { class: "ends" }), el("b"), el("small"));
    const line = () => svg("g", {}, svg("path", { class: "wire" }), svg("path", { class: "flow" }), svg("title"));
    const busiest = this.edges.toSorted((a, b) => b.gb_per_s - a.gb_per_s || b.in_flight - a.in_flight).slice(0, MANY_EDGES);
    this.more.hidden = this.edges.length <= MANY_EDGES;
    put(this.more, `the ${MANY_EDGES} busiest of ${count(this.edges.length)}`);
    const look = (node, edge) => {
      const bad = edge.peer_state !== "ready" || !this.#alive(edge) || this.dead.has(`${edge.from_url} ${edge.to_url}`);
      mark(node, "data-state", bad ? "down" : edge.in_flight > 0 || edge.gb_per_s >= 5e-7 ? "busy" : "idle");
    };
    this.labelNodes.show(this.edges, (edge) => edge.key, make, (node, edge) => {
      look(node, edge);
      put(node.children[0], `${names.get(edge.from_url)} → ${names.get(edge.to_url)}`);
      put(node.children[1], rate(edge.gb_per_s));
      put(node.children[2], edge.in_flight ? `${count(edge.in_flight)} in flight` : `${bytes(edge.bytes)} so far`);
      mark(node, "title", this.#details(edge, names));
      node.classList.toggle("folded", !busiest.includes(edge));
    });
    this.lineNodes.show(this.edges, (edge) => edge.key, line, (node, edge) => {
      look(node, edge);
      put(node.children[2], this.#details(edge, names));
    });
  }

  #details(edge, names) {
    const why = this.dead.get(`${edge.from_url} ${edge.to_url}`);
    return details(edge, names) + (why ? `\nno token comes through: ${why}` : "");
  }

  #alive(edge) {
    return [edge.from_url, edge.to_url].every((url) => this.healthy.has(url));
  }

  /** Draws the lines between the current positions of the cards. */
  #draw() {
    const room = this.wires.getBoundingClientRect();
    if (getComputedStyle(this.lines).display === "none" || room.width === 0) return;
    mark(this.lines, "viewBox", `0 0 ${room.width} ${room.height}`);
    for (const edge of this.edges) {
      const [from, to] = [edge.from_url, edge.to_url].map((url) => this.cards.get(url).getBoundingClientRect());
      const [y1, y2] = [from, to].map((box) => box.top + box.height / 2 - room.top);
      const bend = room.width * 0.45;
      const path = `M0,${y1}C${bend},${y1} ${room.width - bend},${y2} ${room.width},${y2}`;
      const group = this.lineNodes.nodes.get(edge.key);
      const most = this.edges.length > MANY_EDGES ? 1.5 : 4.5;
      const width = 2 + Math.min(most, 1.5 * Math.log10(1 + edge.gb_per_s * 1000));
      group.style.setProperty("--width", `${width}px`);
      mark(group.children[0], "d", path);
      mark(group.children[1], "d", path);
      const at = group.children[0].getPointAtLength(group.children[0].getTotalLength() * (Math.abs(y1 - y2) < 20 ? 0.5 : 0.3));
      const label = this.labelNodes.nodes.get(edge.key);
      label.style.setProperty("--x", `${at.x}px`);
      label.style.setProperty("--y", `${at.y}px`);
    }
  }
}

customElements.define("pd-map", Deployment);
