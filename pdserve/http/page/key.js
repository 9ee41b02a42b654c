// <pd-key>: prompts for the API key if the router needs one.

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
        el("p", { class: "muted" }, "Enter a key of the router's --admin-api-key, or of --api-key if it has no admin key. It is stored until you close this tab."),
        el("label", { for: "key" }, "API key"),
        this.input,
        this.note,
        el("button", { type: "submit", class: "primary" }, "Open"),
      ),
    );
    this.append(this.dialog);
    feed.addEventListener("locked", ({ detail: refused }) => {
      put(this.note, refused ? "The router refused this key." : "");
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
