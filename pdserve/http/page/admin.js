// <pd-admin>: a dialog with the commands for one server: drain, change of its role, migration of its requests. The router
// checks the key; a refusal is shown.

import { Keyed, el, put } from "./dom.js";
import { feed } from "./feed.js";
import { count, span } from "./format.js";

const PATIENCE_MS = 330000;
const host = (url) => url.replace(/^https?:\/\//, "");

async function refusal(answer) {
  try {
    const body = await answer.json();
    return body.error?.message ?? body.message ?? `the router answered ${answer.status}`;
  } catch {
    return `the router answered ${answer.status}`;
  }
}

class Admin extends HTMLElement {
  connectedCallback() {
    this.worker = null;
    this.heading = el("h2", { id: "admin-title" });
    this.address = el("code");
    this.note = el("p", { class: "note", role: "status" });
    this.drain = el("button", { type: "button", onclick: () => this.#drain() });
    this.roleButton = el("button", { type: "button", onclick: () => this.#switch() });
    this.running = el("ul", { class: "running" });
    this.rows = new Keyed(this.running);
    this.none = el("p", { class: "muted" });
    const close = el("button", { type: "button", class: "quiet close", onclick: () => this.dialog.close() }, "Close");
    this.moves = el("section", {}, el("h3", {}, "Running requests"), this.none, this.running);
    this.dialog = el("dialog", { class: "wide", "aria-labelledby": "admin-title" },
      el("div", { class: "head" }, el("div", {}, this.heading, this.address), close),
      el("p", { class: "muted" }, "Commands need the router's --admin-api-key, or its --api-key if it has no admin key."),
      el("div", { class: "actions" }, this.drain, this.roleButton), this.note, this.moves);
    this.dialog.addEventListener("click", (event) => event.target === this.dialog && this.dialog.close());
    this.append(this.dialog);
  }

  /** Opens the dialog for the worker with this id. */
  open(id, label) {
    this.worker = id;
    this.label = label;
    this.confirmed = false;
    put(this.note, "");
    this.show(this.picture);
    this.dialog.showModal();
  }

  /** Called with every snapshot. */
  show(picture) {
    this.picture = picture;
    const worker = picture?.workers.find((one) => one.id === this.worker);
    if (worker === undefined) return;
    put(this.heading, this.label);
    put(this.address, host(worker.url));
    put(this.drain, worker.draining ? "Serve again" : "Drain");
    this.drain.title = worker.draining ? "It gets new requests again" : "It gets no new requests; running requests go on";
    this.roleButton.hidden = worker.worker_type === "regular";
    put(this.roleButton, `Make it a ${this.#other(worker)} server`);
    const others = picture.workers.filter((one) => one.worker_type === "decode" && one.id !== worker.id && one.is_healthy && !one.draining);
    const own = (picture.router.running ?? []).filter((one) => one.decode === worker.url && one.rid !== null);
    this.moves.hidden = worker.worker_type !== "decode";
    put(this.none, own.length === 0 ? "No request with an id runs here." : others.length === 0 ? "There is no other decode server to move them to." : "");
    this.none.hidden = this.none.textContent === "";
    // Rows and buttons stay the same elements between snapshots, so that no click is lost.
    const row = (one) => {
      const node = el("li", {}, el("code", {}, one.rid), el("span", { class: "muted" }), el("span", { class: "targets" }));
      node.buttons = new Keyed(node.lastChild);
      return node;
    };
    this.rows.show(own, (one) => one.rid, row, (node, one) => {
      put(node.children[1], `for ${span(one.age_s)}`);
      const button = (to) => el("button", { type: "button", title: host(to.url), onclick: () => this.#move(one.rid, to.url) });
      node.buttons.show(others, (to) => to.id, button, (found, to) => put(found, `Move to ${this.#name(to.url)}`));
    });
  }

  #other(worker) {
    return worker.worker_type === "prefill" ? "decode" : "prefill";
  }

  #find() {
    return this.picture.workers.find((one) => one.id === this.worker);
  }

  #drain() {
    const worker = this.#find();
    const draining = !worker.draining;
    this.#send("PUT", `workers/${encodeURIComponent(worker.id)}`, { draining }, draining ? "It drains." : "It serves again.");
  }

  #switch() {
    const worker = this.#find();
    const role = this.#other(worker);
    if (!this.confirmed) {
      this.confirmed = true;
      put(this.note, `It drains, then becomes a ${role} server. ${count(worker.load)} requests run there. Press the button again to go on.`);
      return;
    }
    this.confirmed = false;
    this.#send("POST", "pd_role_switch", { worker_url: worker.url, new_role: role }, `It is a ${role} server now.`);
  }

  /** The name that the map shows for a worker. */
  #name(url) {
    const found = this.picture.workers.find((one) => one.url === url);
    const own = this.picture.workers.filter((one) => one.worker_type === found?.worker_type);
    return found === undefined ? host(url) : `${found.worker_type === "prefill" ? "Prefill" : "Decode"} ${own.indexOf(found) + 1}`;
  }

  #move(rid, to) {
    this.#send("POST", "migrate", { rid, to }, `The request has moved to ${this.#name(to)}.`);
  }

  async #send(method, path, body, done) {
    put(this.note, "Sent; waiting for the answer.");
    this.note.classList.remove("error");
    try {
      const headers = feed.headers({ "Content-Type": "application/json" });
      const answer = await fetch(path, { method, headers, body: JSON.stringify(body), signal: AbortSignal.timeout(PATIENCE_MS) });
      this.note.classList.toggle("error", !answer.ok);
      put(this.note, answer.ok ? done : answer.status === 401 ? "The router refused the key of this tab." : await refusal(answer));
    } catch (error) {
      this.note.classList.add("error");
      put(this.note, `No answer: ${error.message}`);
    }
    feed.ask();
  }
}

customElements.define("pd-admin", Admin);
