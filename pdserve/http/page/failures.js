// <pd-failures>: the newest failed requests, which `router.failures` of a snapshot has. The section is hidden without any.

import { Keyed, el, mark, put } from "./dom.js";
import { count, seconds, span } from "./format.js";

const ROWS = 12;
const host = (url) => url.replace(/^https?:\/\//, "");

class Failures extends HTMLElement {
  connectedCallback() {
    this.list = el("ol", { class: "failures", "aria-label": "Failed requests" });
    this.more = el("p", { class: "muted", hidden: true });
    this.append(this.list, this.more);
    this.rows = new Keyed(this.list);
  }

  /** Called with every snapshot. */
  show({ router }) {
    const all = router.failures ?? [];
    this.closest("section").hidden = all.length === 0;
    const make = () => el("li", {}, el("span", { class: "when muted" }), el("b"), el("code"), el("p"));
    this.rows.show(all.slice(0, ROWS), (one) => `${one.time} ${one.id}`, make, (node, one) => {
      const [when, what, where, error] = node.children;
      put(when, `${span(router.time - one.time)} ago`);
      put(what, `${one.path} ${one.status >= 400 ? one.status : "broke off"}`);
      put(where, [one.id, one.worker && host(one.worker)].filter(Boolean).join(" at "));
      put(error, one.error);
      mark(node, "title", `after ${seconds(one.seconds)}`);
    });
    this.more.hidden = all.length <= ROWS;
    put(this.more, `the newest ${ROWS} of the ${count(all.length)} that are kept`);
  }
}

customElements.define("pd-failures", Failures);
