// Fetches /observe from the router about once a second while the page is visible, and holds the API key of this tab.
// Events: "picture" (detail: the answer), "lost" (detail: the reason), "locked" (a key is needed; detail: whether a key
// was refused).

const INTERVAL_MS = 1000;
const PATIENCE_MS = 5000;
const KEY = "pdserve-api-key";

/** The snapshot of one server in the form of a router's; that of a router as it is. */
function asRouter(body) {
  if (body.router !== undefined) return body;
  const { server, replicas, rates, edges, requests } = body;
  const role = { null: "regular", unified: "regular" }[server.mode] ?? server.mode;
  const live = server.live_requests;
  const worker = {
    id: null, url: location.origin, worker_type: role, is_healthy: true, breaker: "closed", draining: false, last_error: null, load: live,
    model_id: server.model, observed: { error: null, age_s: 0, server, replicas, rates },
  };
  const router = {
    version: server.version, pd: role !== "regular", time: Date.now() / 1000, started_at: server.started_at, serving: server.status === "ready",
    queued: 0, running: [], is_server: true,
    failures: requests.filter((one) => one.error !== null).map((one) => ({
      time: one.arrived_at + (one.e2e_s ?? 0), path: one.path ?? "", id: one.id, worker: "", status: 0, error: one.error, seconds: one.e2e_s ?? 0,
    })),
  };
  const halves = requests.map((one) => ({ key: one.id, arrived_at: one.arrived_at, halves: { [role]: { ...one, url: location.origin } } }));
  return { router, workers: [worker], pairs: [], edges: edges.map((one) => ({ ...one, from_url: null, to_url: null })), requests: halves };
}

export class Feed extends EventTarget {
  #timer = null;
  #asking = false;

  /** The key, or null. Stored in sessionStorage, which is deleted with the tab. */
  get key() {
    return sessionStorage.getItem(KEY);
  }

  set key(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
    this.ask();
  }

  /** Returns the headers of a request to the router. */
  headers(more = {}) {
    return this.key === null ? more : { ...more, Authorization: `Bearer ${this.key}` };
  }

  start() {
    document.addEventListener("visibilitychange", () => this.ask());
    this.ask();
  }

  /** Fetches now and then periodically; pauses while the page is hidden. */
  async ask() {
    clearTimeout(this.#timer);
    if (document.hidden || this.#asking) return;
    this.#asking = true;
    const again = await this.#once();
    this.#asking = false;
    if (again) this.#timer = setTimeout(() => this.ask(), INTERVAL_MS);
  }

  /** Fetches once. False: a key is needed before the next fetch. */
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
      this.#tell("picture", asRouter(await answer.json()));
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
