// Asks the router for /observe about once a second while somebody looks, and holds the API key of this tab.
// Events: "picture" (detail: the answer), "lost" (detail: why), "locked" (a key is needed; detail: one was refused).

const INTERVAL_MS = 1000;
const PATIENCE_MS = 5000;
const KEY = "pdserve-api-key";

export class Feed extends EventTarget {
  #timer = null;
  #asking = false;

  /** The key, or null. It is in sessionStorage: it ends with the tab. */
  get key() {
    return sessionStorage.getItem(KEY);
  }

  set key(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
    this.ask();
  }

  /** Headers of every question to the router. */
  headers(more = {}) {
    return this.key === null ? more : { ...more, Authorization: `Bearer ${this.key}` };
  }

  start() {
    document.addEventListener("visibilitychange", () => this.ask());
    this.ask();
  }

  /** Now, and from then on in turn; not while nobody looks. */
  async ask() {
    clearTimeout(this.#timer);
    if (document.hidden || this.#asking) return;
    this.#asking = true;
    const again = await this.#once();
    this.#asking = false;
    if (again) this.#timer = setTimeout(() => this.ask(), INTERVAL_MS);
  }

  /** False where asking again is of no use before there is a key. */
  async #once() {
    const key = this.key;
    try {
      const options = { headers: this.headers(), cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) };
      const answer = await fetch("observe", options);
      if (answer.status === 401) {
        if (key !== this.key) return true;
        this.#tell("locked", key !== null);
        return false;
      }
      if (!answer.ok) throw new Error(`the router answered ${answer.status}`);
      this.#tell("picture", await answer.json());
    } catch (error) {
      this.#tell("lost", error.name === "TimeoutError" ? "no answer for 5 s" : error.message);
    }
    return true;
  }

  #tell(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}

export const feed = new Feed();
