// <pd-ttft>: the latest requests, and the parts of each request's TTFT.

import { Keyed, el, mark, put } from "./dom.js";
import { bytes, count, quantile, seconds, span, tick } from "./format.js";

const PARTS = {
  intake: "Parsing, chat template, tokenizing",
  bootstrap: "Bootstrap between the two servers; decode allocates pages for the prompt",
  queue: "Waiting for the first step",
  prefill: "Computing the prompt",
  transfer: "Rest of the KV transfer to decode after prefill",
  delivery: "From the scheduler to the API process, and the rest",
};
const ROWS = 16;
const FEW = 3;

/** The next larger round number: one digit times a power of ten. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

/** Seconds of the full width: the maximum, but at most `FEW` times the median, so that one slow request does not make the
 * bars of the other requests unreadable. Longer bars are cut. */
function scaleOf(values) {
  const sorted = values.toSorted((a, b) => a - b);
  return sorted.length ? roundUp(Math.min(sorted.at(-1), FEW * quantile(sorted, 0.5))) : 1;
}

function seen(request, isServer) {
  const { prefill, decode, regular } = request.halves;
  return { whole: decode ?? regular ?? prefill, prefill, running: prefill && !decode && !prefill.error && !isServer };
}

class Ttft extends HTMLElement {
  connectedCallback() {
    const key = ([name, what]) => el("li", { title: what }, el("i", { class: `part-${name}` }), name);
    this.legend = el("ul", { class: "legend", "aria-label": "Parts" }, ...Object.entries(PARTS).map(key));
    this.none = el("p", { class: "muted none" }, "No requests yet: send a message in the chat.");
    this.ticks = el("div", { class: "ticks", "aria-hidden": true }, ...[0, 1, 2, 3, 4].map(() => el("span")));
    this.list = el("ol", { class: "rows" });
    const heads = ["when", "", "TTFT", "tokens in → out", "KV moved"].map((text) => el("span", {}, text));
    heads[1].append(this.ticks);
    this.axis = el("div", { class: "row axis", hidden: true }, ...heads);
    this.append(this.legend, this.none, this.axis, this.list);
    this.rows = new Keyed(this.list);
  }

  /** Called with every snapshot. */
  show({ router, requests }) {
    this.now = router.time;
    this.isServer = Boolean(router.is_server);
    const shown = requests.slice(0, ROWS);
    this.none.hidden = shown.length > 0;
    this.axis.hidden = shown.length === 0;
    const scale = scaleOf(shown.map((one) => seen(one, this.isServer).whole.ttft_s ?? 0).filter((value) => value > 0));
    [...this.ticks.children].forEach((node, index) => put(node, index ? tick((scale * index) / 4) : "0"));
    this.rows.show(shown, (one) => one.key, () => this.#row(), (node, one) => this.#showRow(node, one, scale, router.time));
  }

  #row() {
    const bar = el("div", { class: "bar", role: "img" }, ...Object.keys(PARTS).map((name) => el("i", { class: `part-${name}` })), el("em"));
    const node = el("li", { class: "row" }, el("button", { type: "button", class: "when" }), bar, el("b"), el("span", { class: "tokens" }), el("span", { class: "moved" }));
    node.addEventListener("click", () => document.querySelector("pd-request").open(node.request, this.now));
    return node;
  }

  #showRow(node, request, scale, now) {
    const { whole, prefill, running } = seen(request, this.isServer);
    node.request = request;
    const [when, bar, total, tokens, moved] = node.children;
    const failed = Boolean(whole.error ?? prefill?.error);
    node.classList.toggle("failed", failed);
    bar.classList.toggle("cut", (whole.ttft_s ?? 0) > scale);
    put(bar.lastChild, whole.error ?? prefill?.error ?? "");
    put(when, `${span(now - request.arrived_at)} ago`);
    mark(when, "aria-label", `Request ${whole.id}, ${when.textContent}: show its parts`);
    Object.keys(PARTS).forEach((name, index) => {
      const value = whole.ttft_parts[name] ?? 0;
      bar.children[index].style.width = `${(100 * value) / scale}%`;
      mark(bar.children[index], "title", `${name}: ${seconds(value)}`);
    });
    put(total, whole.ttft_s === null ? (failed ? "failed" : "–") : seconds(whole.ttft_s));
    const cached = prefill?.cached_tokens ?? whole.cached_tokens;
    put(tokens, `${count(whole.prompt_tokens)} → ${running ? "…" : count(whole.completion_tokens)}`);
    put(moved, whole.kv_bytes === null ? "–" : bytes(whole.kv_bytes));
    const parts = Object.entries(whole.ttft_parts).map(([name, value]) => `${name} ${seconds(value)}`);
    mark(bar, "aria-label", [...parts, failed ? bar.lastChild.textContent : ""].filter(Boolean).join(", "));
    const facts = [
      `${whole.path ?? ""} ${whole.id}`,
      Object.entries(request.halves).map(([role, half]) => `${role} on ${half.url.replace(/^https?:\/\//, "")}`).join(", "),
      `${count(whole.prompt_tokens)} prompt tokens, ${count(cached)} of them cached`,
      parts.join(", "),
      whole.error ?? prefill?.error ?? `${running ? "still writing" : `ended with ${whole.outcome} after ${seconds(whole.e2e_s ?? 0)}`}`,
    ];
    mark(node, "title", facts.join("\n"));
  }
}

customElements.define("pd-ttft", Ttft);
