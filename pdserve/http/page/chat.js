// <pd-chat>: a conversation with the model through the router's own /v1/chat/completions, streamed.

import { el, put } from "./dom.js";
import { feed } from "./feed.js";
import { count, seconds, speed } from "./format.js";

const HINT = "Send a message to the model. The request runs through the whole deployment: watch KV pages and KV transfers.";
const SAMPLES = ["Why is the sky blue?", "Write a haiku about memory.", "List three uses of a paper clip."];

/** Yields the events of a stream as objects, until [DONE]. Throws the server's error message. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value.replaceAll("\r", "");
    const found = text.split("\n\n");
    text = found.pop();
    for (const event of found) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (data === "") continue;
      const parsed = JSON.parse(data);
      if (parsed.error) throw new Error(parsed.error.message ?? "the stream broke");
      yield parsed;
    }
  }
}

async function refusal(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the router answered ${answer.status}`;
  }
}

/** Measures TTFT, and tokens per second after the first token. */
class Watch {
  constructor() {
    this.began = performance.now();
    this.first = null;
    this.last = null;
    this.tokens = 0;
  }

  token() {
    this.last = performance.now();
    this.first ??= this.last;
    this.tokens += 1;
  }

  text(end) {
    if (this.first === null) return end === null ? "waiting for the first token" : end;
    const parts = [`TTFT ${seconds((this.first - this.began) / 1000)}`, `${count(this.tokens)} tokens`];
    const took = (this.last - this.first) / 1000;
    if (this.tokens > 1 && took > 0) parts.splice(1, 0, `${speed((this.tokens - 1) / took)} tok/s`);
    return [...parts, ...(end === null ? [] : [end])].join(" · ");
  }
}

class Chat extends HTMLElement {
  connectedCallback() {
    this.past = [];
    /** The model name in requests; set with every snapshot. */
    this.model = null;
    this.stopper = null;
    this.log = el("div", { class: "log", role: "log", "aria-label": "Conversation", tabindex: "0" });
    this.input = el("textarea", {
      id: "prompt", rows: "2", placeholder: "Message", "aria-label": "Message", onkeydown: (event) => this.#key(event),
    });
    this.send = el("button", { type: "submit", class: "primary" }, "Send");
    this.stop = el("button", { type: "button", class: "danger", hidden: true, onclick: () => this.stopper?.abort() }, "Stop");
    this.clear = el("button", { type: "button", class: "quiet", onclick: () => this.#clear() }, "New chat");
    this.limit = el("input", { type: "number", min: "1", max: "100000", value: "256" });
    this.heat = el("input", { type: "number", min: "0", max: "2", step: "0.1", value: "0.7" });
    const options = el("div", { class: "options" }, el("label", {}, "max tokens ", this.limit), el("label", {}, "temperature ", this.heat), this.clear);
    const write = el("div", { class: "write" }, this.input, this.send, this.stop);
    this.form = el("form", { novalidate: true, onsubmit: (event) => this.#submit(event) }, write, options);
    this.append(this.log, this.form);
    this.#clear();
  }

  #clear() {
    this.stopper?.abort();
    this.past = [];
    const sample = (text) => el("button", { type: "button", class: "sample", onclick: () => this.#ask(text) }, text);
    this.log.replaceChildren(el("div", { class: "empty" }, el("p", { class: "muted" }, HINT), ...SAMPLES.map(sample)));
  }

  #key(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.form.requestSubmit();
    }
  }

  #submit(event) {
    event.preventDefault();
    const text = this.input.value.trim();
    if (text === "" || this.stopper !== null) return;
    this.input.value = "";
    this.#ask(text);
  }

  #add(role, ...children) {
    this.log.querySelector(".empty")?.remove();
    const node = el("article", { class: `said ${role}`, "aria-label": role === "user" ? "You" : "Model" }, ...children);
    this.log.append(node);
    this.log.scrollTop = this.log.scrollHeight;
    return node;
  }

  #busy(stopper) {
    this.stopper = stopper;
    this.send.hidden = stopper !== null;
    this.stop.hidden = stopper === null;
  }

  async #ask(text) {
    this.#add("user", el("p", {}, text));
    this.past.push({ role: "user", content: text });
    const thoughts = el("p", { class: "thoughts", hidden: true });
    const answer = el("p", { class: "answer" });
    const stats = el("small", { class: "stats" });
    const node = this.#add("model", thoughts, answer, stats);
    const [watch, stopper, past] = [new Watch(), new AbortController(), this.past];
    this.#busy(stopper);
    let [said, end] = ["", null];
    try {
      for await (const event of this.#stream(stopper.signal)) {
        const choice = event.choices?.[0];
        const piece = choice?.delta?.content ?? "";
        const thought = choice?.delta?.reasoning_content ?? "";
        if (piece !== "" || thought !== "") watch.token();
        if (event.usage) watch.tokens = Math.max(1, event.usage.completion_tokens);
        said += piece;
        answer.append(piece);
        thoughts.append(thought);
        thoughts.hidden &&= thought === "";
        end = choice?.finish_reason ?? end;
        put(stats, watch.text(null));
        this.log.scrollTop = this.log.scrollHeight;
      }
      end = end === "length" ? "cut at max tokens" : end === "stop" ? null : end;
      put(stats, watch.text(end ?? (watch.first === null ? "empty answer" : null)));
    } catch (error) {
      const stopped = stopper.signal.aborted;
      node.classList.toggle("failed", !stopped);
      put(stats, watch.text(stopped ? "stopped" : error.message));
    }
    if (said !== "") past.push({ role: "assistant", content: said });
    else past.pop();
    node.dataset.done = "";
    if (this.stopper === stopper) this.#busy(null);
  }

  async *#stream(signal) {
    const body = {
      model: this.model ?? "default",
      messages: this.past,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      max_completion_tokens: Math.max(1, Math.floor(Number(this.limit.value)) || 256),
      temperature: Math.min(2, Math.max(0, Number(this.heat.value) || 0)),
    };
    const headers = feed.headers({ "Content-Type": "application/json" });
    const answer = await fetch("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
    if (!answer.ok) throw new Error(await refusal(answer));
    yield* events(answer.body);
  }
}

customElements.define("pd-chat", Chat);
