// <pd-config>: the models with their adapters, and the configuration of each server, read when the section is opened.

import { el, mark, put } from "./dom.js";
import { feed } from "./feed.js";

const PATIENCE_MS = 10000;
/** Time between two readings of the models: adapters come and go. */
const MODELS_MS = 30000;
/** Fields that are shown first; the table has all plain values. */
const FIRST = ["model_path", "served_model_name", "version", "disaggregation_mode", "dtype", "kv_cache_dtype", "quantization", "tp_size", "pp_size", "dp_size", "ep_size", "max_total_num_tokens", "page_size"];
const host = (url) => url.replace(/^https?:\/\//, "");

async function read(path) {
  const answer = await fetch(path, { headers: feed.headers(), cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
  if (!answer.ok) throw new Error(`${path} answered ${answer.status}`);
  return answer.json();
}

const isPlain = (value) => value !== null && (typeof value !== "object" || (Array.isArray(value) && value.length > 0 && value.every((one) => typeof one !== "object")));
const shown = (value) => (Array.isArray(value) ? value.join(", ") : String(value));

/** The plain values of a server's facts, important ones first, then by name. */
function rowsOf(info) {
  const rank = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
  return Object.entries(info).filter(([name, value]) => name !== "url" && isPlain(value) && shown(value) !== "")
    .sort(([a], [b]) => rank(a) - rank(b) || a.localeCompare(b));
}

class Config extends HTMLElement {
  connectedCallback() {
    this.models = el("ul", { class: "models", "aria-label": "Models and adapters" });
    this.filter = el("input", { type: "search", placeholder: "Filter settings", "aria-label": "Filter settings", oninput: () => this.#filter() });
    this.servers = el("div", { class: "servers" });
    this.note = el("p", { class: "muted" }, "Reading.");
    this.details = el("details", { ontoggle: () => this.details.open && this.#read() },
      el("summary", {}, "Settings of each server"), this.filter, this.note, this.servers);
    this.append(this.models, this.details);
    this.readAt = -Infinity;
    feed.addEventListener("picture", () => performance.now() - this.readAt >= MODELS_MS && this.#readModels());
  }

  async #readModels() {
    this.readAt = performance.now();
    try {
      const { data } = await read("v1/models");
      this.dispatchEvent(new CustomEvent("models", { detail: data.map((one) => one.id), bubbles: true }));
      this.models.replaceChildren(...data.map((one) => el("li", {}, el("b", {}, one.id),
        el("span", { class: "muted" }, one.parent ? `adapter of ${one.parent}` : one.max_model_len ? `model, context ${one.max_model_len.toLocaleString("en")} tokens` : "model"))));
    } catch (error) {
      this.models.replaceChildren(el("li", { class: "muted" }, `The models cannot be read: ${error.message}`));
    }
  }

  async #read() {
    try {
      const info = await read("get_server_info");
      const roles = ["prefill", "decode", "regular"].flatMap((role) => (Array.isArray(info[role]) ? info[role].map((one, index) => [role, index, one]) : []));
      const all = roles.length ? roles : [["server", 0, info]];
      this.servers.replaceChildren(...all.map(([role, index, one]) => this.#table(`${role} ${index + 1}${one.url ? ` · ${host(one.url)}` : ""}`, one)));
      put(this.note, "");
      this.#filter();
    } catch (error) {
      put(this.note, `The settings cannot be read: ${error.message}`);
    }
  }

  #table(title, info) {
    const rows = rowsOf(info).map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, shown(value))));
    return el("section", { class: "settings" }, el("h3", {}, title), el("div", { class: "scrolls" }, el("table", {}, el("tbody", {}, ...rows))));
  }

  #filter() {
    const wanted = this.filter.value.trim().toLowerCase();
    for (const row of this.servers.querySelectorAll("tr")) mark(row, "hidden", wanted !== "" && !row.textContent.toLowerCase().includes(wanted));
  }
}

customElements.define("pd-config", Config);
