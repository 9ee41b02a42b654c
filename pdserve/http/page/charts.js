// <pd-charts>: the history of the fleet or of one worker as line charts by uPlot, with a choice of the time range.

import { el, mark, put } from "./dom.js";
import { feed } from "./feed.js";
import { bytes, count, percent, seconds, speed, tick } from "./format.js";
import { RANGES, history, share } from "./history.js";

const HEIGHT = 132;
const LATENCY = [["p50", "c1"], ["p95", "c2"], ["p99", "c3"]];
const latency = (name) => LATENCY.map(([quantile, colour]) => [quantile, colour, (of) => of(`${name}_${quantile}_s`)]);

/** The charts: title, explanation, format of values, and lines of [name, colour, function that returns the values].
 * An `optional` chart is hidden while it has no value; one of `streams`, on the page of a prefill server, which has none. */
const CHARTS = [
  { name: "TTFT", what: "Time to the first token of streams, from the arrival at this address", text: seconds, lines: latency("ttft") },
  { name: "Time to second token", what: "From the arrival to the second token: with disaggregation the first one that decode computes", text: seconds, streams: true, lines: latency("second_token") },
  { name: "ITL", what: "Inter-token latency: time between two pieces of a stream", text: seconds, streams: true, lines: latency("itl") },
  { name: "Error rate", what: "Share of ended requests that failed, by status 5xx, a broken stream or an error event", text: percent, top: 0.05, lines: [
    ["failed", "c4", (of) => share(of("failed"), of("requests"))],
  ] },
  { name: "Requests", what: "Requests that run, and that wait in queues", text: count, top: 4, lines: [
    ["running", "c1", (of) => of("running")],
    ["queued", "c4", (of) => of("queued")],
  ] },
  { name: "Tokens per second", what: "Generated tokens, as the servers report", text: speed, lines: [["output", "c1", (of) => of("tokens_per_s")]] },
  { name: "KV memory", what: "Used share of the KV memory by tier: on the device, and in host memory", text: percent, top: 1, lines: [
    ["device", "c1", (of) => share(of("kv_device_used"), of("kv_device_total"))],
    ["host", "c2", (of) => share(of("kv_host_used"), of("kv_host_total"))],
  ] },
  { name: "KV transfers", what: "Bytes a second of KV from prefill to decode, and of moved requests", text: (value) => `${bytes(value)}/s`, top: 1000, optional: true, lines: [
    ["moved", "c2", (of) => of("kv_transfer")],
  ] },
  { name: "Prefix cache hits", what: "Share of the tokens of each server's newest 128 prompts that its prefix cache had", text: percent, top: 1, optional: true, lines: [
    ["cached", "c1", (of) => of("cache_hit_rate")],
  ] },
  { name: "KV store", what: "Bytes a second that are read from and written to the storage tier", text: (value) => `${bytes(value)}/s`, optional: true, lines: [
    ["read", "c1", (of) => of("kv_store_read")],
    ["written", "c2", (of) => of("kv_store_written")],
  ] },
  { name: "Accept length", what: "Tokens per step that verified draft tokens", text: (value) => value.toFixed(2), top: 2, optional: true, lines: [
    ["tokens", "c1", (of) => of("accept_length")],
  ] },
];

const clock = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const minutes = (range) => (range < 60 ? `${range} s` : `${range / 60} min`);
/** Whether this is the page of a prefill server. */
let hasNoStreams = false;
feed.addEventListener("picture", ({ detail: { router, workers } }) => (hasNoStreams = Boolean(router.is_server) && workers[0].worker_type === "prefill"));
const has = (values) => values.some((value) => value !== null);

/** The places of values without a neighbour, which no line shows; null: all points are shown. */
function alone(plot, index, shown) {
  if (shown) return null;
  const values = plot.data[index];
  return values.flatMap((value, place) => (value !== null && (values[place - 1] ?? null) === null && (values[place + 1] ?? null) === null ? [place] : []));
}

/** A chart in its card: title, the newest values as a legend, the canvas. */
class Chart {
  constructor(spec) {
    this.spec = spec;
    this.legend = spec.lines.map(([name, colour]) => ({ name, value: el("b", {}, "–"), node: null, colour }));
    const keys = this.legend.map((one) => (one.node = el("li", {}, el("i", { class: one.colour }), one.name, " ", one.value)));
    this.when = el("small", {});
    this.empty = el("p", { class: "muted", hidden: true }, "no values in this range");
    this.canvas = el("div", { class: "canvas", role: "img" }, this.empty);
    this.box = el("figure", { title: spec.what }, el("figcaption", {}, el("span", {}, spec.name), this.when), el("ul", { class: "legend" }, ...keys), this.canvas);
    this.plot = null;
  }

  /** Shows the values of `view`; see `History.view`. */
  show(view) {
    this.values = this.spec.lines.map(([, , of]) => of(view.of));
    this.box.hidden = (this.spec.optional || (this.spec.streams && hasNoStreams)) && !this.values.some(has);
    this.view = view;
    this.empty.hidden = this.values.some(has);
    this.#newest(null);
    if (this.box.hidden || this.canvas.clientWidth === 0) return;
    this.plot ??= this.#make();
    this.plot.setData([view.times, ...this.values], false);
    this.#rescale();
  }

  /** Fits the chart to its card. */
  fit() {
    const width = this.canvas.clientWidth;
    if (this.plot !== null && width > 0 && this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT });
    else if (this.plot === null && this.view !== undefined) this.show(this.view);
  }

  /** Makes the chart anew, with the colours of the present scheme. */
  restyle() {
    this.plot?.destroy();
    this.plot = null;
    if (this.view !== undefined) this.show(this.view);
  }

  #rescale() {
    const most = Math.max(this.spec.top ?? 0, ...this.values.flat().filter((value) => value !== null));
    this.plot.batch(() => {
      this.plot.setScale("x", { min: this.view.from, max: this.view.to });
      this.plot.setScale("y", { min: 0, max: most > 0 ? most * 1.08 : 1 });
    });
  }

  /** Shows the values at the place of the pointer; null: the newest ones. */
  #newest(place) {
    this.values.forEach((values, index) => {
      const value = place === null ? values.findLast((one) => one !== null) : values[place];
      put(this.legend[index].value, value === null || value === undefined ? "–" : this.spec.text(value));
      this.legend[index].node.hidden = values.length > 0 && !has(values) && this.values.some(has);
    });
    put(this.when, place === null ? "" : clock.format(new Date(this.view.times[place] * 1000)));
    const spoken = this.legend.map((one) => `${one.name} ${one.value.textContent}`).join(", ");
    mark(this.canvas, "aria-label", `${this.spec.name}: ${spoken}`);
  }

  #make() {
    const style = getComputedStyle(this.box);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const font = `11px ${style.fontFamily}`;
    const axis = { stroke: colour("muted"), font, grid: { stroke: colour("track"), width: 1 }, ticks: { show: false } };
    const options = {
      width: this.canvas.clientWidth,
      height: HEIGHT,
      legend: { show: false },
      padding: [8, 18, 0, 0],
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
      scales: { x: { time: true, auto: false }, y: { auto: false } },
      axes: [
        { ...axis, size: 28, gap: 6, incrs: () => (history.range > 60 ? [60, 120, 300] : [5, 10, 15, 30]), space: (_, index, from, to) => (to - from < 100 ? 52 : 40), values: (_, splits) => splits.map((at) => clock.format(new Date(at * 1000)).slice(0, history.range > 60 ? 5 : 8)) },
        { ...axis, size: 58, gap: 4, space: 28, values: (_, splits) => splits.map((value) => (this.spec.text === seconds ? tick(value) : this.spec.text(value))) },
      ],
      series: [{}, ...this.spec.lines.map(([name, line]) => ({
        label: name, stroke: colour(line), width: 1.6, points: { size: 4, filter: alone }, spanGaps: false,
      }))],
      hooks: { setCursor: [(plot) => this.#newest(plot.cursor.idx ?? null)] },
    };
    return new uPlot(options, [this.view.times, ...this.values], this.canvas);
  }
}

class Charts extends HTMLElement {
  connectedCallback() {
    const choose = (range) => el("button", { type: "button", "data-range": range, onclick: () => (history.range = range) }, minutes(range));
    this.buttons = RANGES.map(choose);
    this.select = el("select", { "aria-label": "Server", onchange: () => history.show(this.select.value || null) }, el("option", { value: "" }, "all servers"));
    this.charts = CHARTS.map((spec) => new Chart(spec));
    this.append(
      el("div", { class: "controls" }, el("div", { class: "ranges", role: "group", "aria-label": "Time range" }, ...this.buttons), this.select),
      el("div", { class: "plots" }, ...this.charts.map((one) => one.box)),
    );
    history.addEventListener("history", () => this.#show());
    new ResizeObserver(() => this.charts.forEach((one) => one.fit())).observe(this);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.charts.forEach((one) => one.restyle()));
    this.#show();
  }

  #show() {
    this.buttons.forEach((one) => mark(one, "aria-pressed", String(Number(one.dataset.range) === history.range)));
    const known = [...this.select.options].slice(1).map((one) => one.value);
    if (known.join(" ") !== history.workers.join(" ")) {
      const options = history.workers.map((url) => el("option", { value: url }, url.replace(/^https?:\/\//, "")));
      this.select.replaceChildren(this.select.options[0], ...options);
    }
    this.select.hidden = history.workers.length === 0;
    this.select.value = history.worker ?? "";
    const view = history.view();
    this.charts.forEach((one) => one.show(view));
    this.charts.forEach((one) => one.fit()); // a chart that has appeared makes others narrower
  }
}

customElements.define("pd-charts", Charts);
