// <pd-tiles>: numbers of the deployment, each with the time window that it is of, and a line over the chosen time range.

import { el, mark, put, svg } from "./dom.js";
import { bytes, count, percent, rate, seconds, speed } from "./format.js";
import { history, share } from "./history.js";

/** Stands for the chosen time range. */
const RANGE = Symbol("range");

const WIDTH = 120;
const HEIGHT = 28;

const sum = (list, of) => list.reduce((total, item) => total + of(item), 0);
const replicas = (workers) => workers.flatMap((one) => one.observed.replicas).filter((one) => one.state !== null);

/** The numbers: name, time window, explanation, a function that returns the values behind the line from the history, and a
 * function of a snapshot that returns [text, note]; null: the tile is hidden. */
const TILES = [
  ["In flight", "now", "Requests at workers, as the router counts them", (of) => of("running"), (p) => {
    const own = sum(p.writers, (one) => one.load);
    return [count(own), p.router.queued ? `${count(p.router.queued)} queued in the router` : "none queued"];
  }],
  ["Tokens per second", "10 s", "Output of all workers over the last 10 s", (of) => of("tokens_per_s"), (p) => {
    const now = sum(p.writers, (one) => one.observed.rates?.generation_tokens_per_s ?? 0);
    const running = sum(replicas(p.writers), (one) => one.state.running);
    return [speed(now), `${count(running)} running`];
  }],
  ["TTFT, median", RANGE, "Time to the first token of streams", (of) => of("ttft_p50_s"), (p) => latency(p.window, "ttft")],
  ["ITL, median", RANGE, "Time between two pieces of a stream", (of) => of("itl_p50_s"), (p) => latency(p.window, "itl")],
  ["Error rate", RANGE, "Share of ended requests that failed", (of) => share(of("failed"), of("requests")), (p) => {
    const { requests = 0, failed = 0 } = p.window;
    return [requests ? percent(failed / requests) : "–", `${count(failed)} of ${count(requests)} failed`];
  }],
  ["KV transfer", "5 s", "Bytes from prefill to decode over the last 5 s", (of) => of("kv_transfer"), (p) => {
    if (!p.router.pd) return null;
    const now = sum(p.edges, (one) => one.gb_per_s);
    return [rate(now), `${bytes(sum(p.edges, (one) => one.bytes))} so far`];
  }],
  ["Prefix cache", "128 prompts", "Share of the tokens of each server's newest 128 prompts that its prefix cache had", (of) => of("cache_hit_rate"), (p) => {
    const known = p.readers.filter((one) => one.observed.rates !== null);
    const hits = known.length ? sum(known, (one) => one.observed.rates.cache_hit_rate) / known.length : 0;
    const kept = sum(replicas(p.readers), (one) => one.state.pages.evictable + one.state.pages.locked);
    return [percent(hits), `${count(kept)} pages kept`];
  }],
  ["KV memory in use", "now", "Share of KV pages of all servers that requests hold", (of) => share(of("kv_device_used"), of("kv_device_total")), (p) => {
    const all = replicas(p.workers);
    const total = sum(all, (one) => one.state.pages.total);
    const held = sum(all, (one) => one.state.pages.locked + one.state.pages.leased);
    return [percent(total ? held / total : 0), `${count(held)} of ${count(total)} pages`];
  }],
  ["Accept length", "10 s", "Tokens per step that verified draft tokens, over the last 10 s", (of) => of("accept_length"), (p) => {
    const known = p.writers.map((one) => one.observed.rates).filter((one) => one?.spec_accept_length != null);
    if (known.length === 0) return null;
    const drafting = known.filter((one) => one.spec_accept_length > 0);
    if (drafting.length === 0) return ["–", "no drafts"];
    const mean = (of) => sum(drafting, of) / drafting.length;
    const length = mean((one) => one.spec_accept_length);
    return [length.toFixed(2), `${percent(mean((one) => one.spec_accept_rate))} accepted`];
  }],
];

function latency(window, name) {
  const half = window[`${name}_p50_s`] ?? null;
  if (half === null) return ["–", "no streams"];
  const high = (quantile) => `${quantile} ${seconds(window[`${name}_${quantile}_s`])}`.replaceAll(" ", "\u00a0");
  return [seconds(half), `${high("p95")}\u2002${high("p99")}`];
}

const windowName = (what) => (what === RANGE ? `${history.range / 60} min` : what);

class Tiles extends HTMLElement {
  connectedCallback() {
    this.parts = TILES.map(([name, , what]) => {
      const part = { value: el("strong", {}, "–"), note: el("small", {}), line: svg("path"), area: svg("path", { class: "area" }) };
      const chart = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": true }, part.area, part.line);
      part.window = el("em");
      part.tile = el("div", { class: "tile", title: what }, el("span", {}, name), part.window, part.value, part.note, chart);
      this.append(part.tile);
      return part;
    });
    history.addEventListener("history", () => this.picture && this.show(this.picture));
  }

  /** Called with every snapshot. */
  show(picture) {
    this.picture = picture;
    const { workers } = picture;
    const points = history.worker === null ? history.view() : null;
    const view = {
      ...picture,
      window: history.windows[history.range] ?? {},
      writers: workers.filter((one) => one.worker_type !== "prefill"),
      readers: workers.filter((one) => one.worker_type !== "decode"),
    };
    TILES.forEach(([, what, , past, of], index) => {
      const part = this.parts[index];
      put(part.window, windowName(what));
      this.#showOne(part, of(view), points === null ? [] : past(points.of));
    });
    this.#columns();
  }

  #columns() {
    const shown = this.parts.filter((part) => !part.tile.hidden).length;
    this.style.setProperty("--columns", shown > 8 ? 5 : 4);
  }

  #showOne(part, shown, past) {
    part.tile.hidden = shown === null;
    if (shown === null) return;
    const [text, note] = shown;
    put(part.value, text);
    put(part.note, note);
    mark(part.note, "title", note);
    const values = past.map((one) => one ?? 0);
    if (values.length === 0) {
      mark(part.line, "d", null);
      mark(part.area, "d", null);
      return;
    }
    const top = Math.max(...values) * 1.1 || 1;
    const room = Math.max(2, Math.round(history.range / history.interval));
    const first = Math.max(0, room - values.length);
    const points = values.slice(-room).map((v, i) => `${(((first + i) / (room - 1)) * WIDTH).toFixed(1)},${(HEIGHT - 1 - (v / top) * (HEIGHT - 3)).toFixed(1)}`);
    const line = `M${points.join("L")}`;
    mark(part.line, "d", line);
    mark(part.area, "d", `${line}L${WIDTH},${HEIGHT}L${points[0].split(",")[0]},${HEIGHT}Z`);
  }
}

customElements.define("pd-tiles", Tiles);
