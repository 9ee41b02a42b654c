// <pd-tiles>: numbers of the deployment, with their history over the last two minutes.

import { el, mark, put, svg } from "./dom.js";
import { bytes, count, percent, quantile, rate, seconds, speed } from "./format.js";

const KEPT = 120;
const LEAST = 30;
const WIDTH = 120;
const HEIGHT = 28;

const sum = (list, of) => list.reduce((total, item) => total + of(item), 0);
const replicas = (workers) => workers.flatMap((one) => one.observed.replicas).filter((one) => one.state !== null);

/** The numbers: name, explanation, and a function of a snapshot that returns [value, text, note]; null: the tile is hidden. */
const TILES = [
  ["In flight", "Requests at workers now, as the router counts them", (p) => {
    const own = sum(p.writers, (one) => one.load);
    return [own, count(own), p.router.queued ? `${count(p.router.queued)} queued in the router` : "none queued in the router"];
  }],
  ["Tokens per second", "Output of all workers over the last 10 s", (p) => {
    const now = sum(p.writers, (one) => one.observed.rates?.generation_tokens_per_s ?? 0);
    const running = sum(replicas(p.writers), (one) => one.state.running);
    return [now, speed(now), `${count(running)} running`];
  }],
  ["KV transfer", "Bytes from prefill to decode over the last 5 s", (p) => {
    const now = sum(p.edges, (one) => one.gb_per_s);
    const moved = `${bytes(sum(p.edges, (one) => one.bytes))} in ${count(sum(p.edges, (one) => one.transfers))} transfers`;
    return [now, rate(now), p.router.pd ? moved : "no disaggregation"];
  }],
  ["TTFT, median", "Time to the first token of the requests listed below", (p) => {
    const all = p.requests.map(ttftOf).filter((value) => value !== null).sort((a, b) => a - b);
    const half = quantile(all, 0.5);
    return [half ?? 0, half === null ? "–" : seconds(half), half === null ? "no requests yet" : `p95 ${seconds(quantile(all, 0.95))}`];
  }],
  ["Prefix cache", "Share of prompt tokens found in the prefix cache", (p) => {
    const known = p.readers.filter((one) => one.observed.rates !== null);
    const hits = known.length ? sum(known, (one) => one.observed.rates.cache_hit_rate) / known.length : 0;
    const kept = sum(replicas(p.readers), (one) => one.state.pages.evictable + one.state.pages.locked);
    return [hits, percent(hits), `${count(kept)} pages kept`];
  }],
  ["KV memory in use", "Share of KV pages of all servers that requests hold", (p) => {
    const all = replicas(p.workers);
    const total = sum(all, (one) => one.state.pages.total);
    const held = sum(all, (one) => one.state.pages.locked + one.state.pages.leased);
    return [total ? held / total : 0, percent(total ? held / total : 0), `${count(held)} of ${count(total)} pages`];
  }],
  ["Accept length", "Tokens per step that verified draft tokens, over the last 10 s", (p) => {
    const known = p.writers.map((one) => one.observed.rates).filter((one) => one?.spec_accept_length != null);
    if (known.length === 0) return null;
    const drafting = known.filter((one) => one.spec_accept_length > 0);
    if (drafting.length === 0) return [0, "–", "no drafts"];
    const mean = (of) => sum(drafting, of) / drafting.length;
    const length = mean((one) => one.spec_accept_length);
    return [length, length.toFixed(2), `${percent(mean((one) => one.spec_accept_rate))} of drafts accepted`];
  }],
];

/** TTFT in seconds without the router's part: that of decode, or of a regular server. */
export function ttftOf(request) {
  const half = request.halves.decode ?? request.halves.regular ?? request.halves.prefill;
  return half.ttft_s;
}

class Tiles extends HTMLElement {
  connectedCallback() {
    this.parts = TILES.map(([name, what]) => {
      const part = { value: el("strong", {}, "–"), note: el("small", {}), line: svg("path"), area: svg("path", { class: "area" }), past: [] };
      const chart = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": true }, part.area, part.line);
      part.tile = el("div", { class: "tile", title: what }, el("span", {}, name), part.value, part.note, chart);
      this.append(part.tile);
      return part;
    });
  }

  /** Called with every snapshot. */
  show(picture) {
    const { workers } = picture;
    const view = {
      ...picture,
      writers: workers.filter((one) => one.worker_type !== "prefill"),
      readers: workers.filter((one) => one.worker_type !== "decode"),
    };
    TILES.forEach(([, , of], index) => this.#showOne(this.parts[index], of(view)));
  }

  #showOne(part, shown) {
    part.tile.hidden = shown === null;
    if (shown === null) return;
    const [value, text, note] = shown;
    put(part.value, text);
    put(part.note, note);
    part.past = [...part.past, value].slice(-KEPT);
    const top = Math.max(...part.past) * 1.1 || 1;
    const room = Math.max(LEAST, part.past.length);
    const first = room - part.past.length;
    const points = part.past.map((v, i) => `${(((first + i) / (room - 1)) * WIDTH).toFixed(1)},${(HEIGHT - 1 - (v / top) * (HEIGHT - 3)).toFixed(1)}`);
    const line = `M${points.join("L")}`;
    mark(part.line, "d", line);
    mark(part.area, "d", `${line}L${WIDTH},${HEIGHT}L${points[0].split(",")[0]},${HEIGHT}Z`);
  }
}

customElements.define("pd-tiles", Tiles);
