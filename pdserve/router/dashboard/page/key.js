// <pd-key>: asks for the router's API key where it has one.

import { el, put } from "./dom.js";
import { feed } from "./feed.js";

class Key extends HTMLElement {
  connectedCallback() {
    this.input = el("input", { id: "key", type: "password", autocomplete: "off", required: true, "aria-describedby": "key-note" });
    this.note = el("p", { id: "key-note", class: "error", role: "alert" });
    this.dialog = el(
      "dialog",
      { "aria-labelledby": "key-title", oncancel: (event) => event.preventDefault() },
      el(
        "form",
        { onsubmit: (event) => this.#submit(event) },
        el("h2", { id: "key-title" }, "This router needs a key"),
        el("p", { class: "muted" }, "The one that it was started with as --api-key. It stays in this tab until you close it."),
        el("label", { for: "key" }, "API key"),
        this.input,
        this.note,
        el("button", { type: "submit", class: "primary" }, "Open"),
      ),
    );
    this.append(this.dialog);
    feed.addEventListener("locked", ({ detail: refused }) => {
      put(this.note, refused ? "The router does not know this key." : "");
      if (!this.dialog.open) this.dialog.showModal();
      this.input.select();
    });
    feed.addEventListener("picture", () => this.dialog.close());
  }

  #submit(event) {
    event.preventDefault();
    feed.key = this.input.value.trim();
    this.input.value = "";
  }
}

customElements.define("pd-key", Key);
