// Fetches /observe/history every few seconds while the page is visible, and keeps the points of the fleet or of one worker.
// Event: "history" (detail: this object), also when the time range changes.

import { feed } from "./feed.js";

const INTERVAL_MS = 5000;
const PATIENCE_MS = 5000;
const RANGE = "pdserve-range-s";
/** Time ranges in seconds. */
export const RANGES = [60, 300, 900];

/** The quotients of two lists of values; null where one is not known, or the second is 0. */
export const share = (used, total) => used.map((value, index) => (value === null || !total[index] ? null : value / total[index]));

class History extends EventTarget {
  #timer = null;
  #asking = false;
  #started = false;
  #stored = Number(sessionStorage.getItem(RANGE));

  /** Ends of the intervals, in seconds since 1970. */
  times = [];
  /** Values by field; null: not known. */
  series = {};
  /** Counts and quantiles of the fleet by time window, in seconds. */
  windows = {};
  /** URLs of the workers that have a history. */
  workers = [];
  /** URL of the shown worker; null: the fleet. */
  worker = null;
  interval = 5;
  now = 0;

  /** The shown time range in seconds. */
  get range() {
    return RANGES.includes(this.#stored) ? this.#stored : RANGES[1];
  }

  set range(seconds) {
    this.#stored = seconds;
    sessionStorage.setItem(RANGE, seconds);
    this.#tell();
  }

  /** Shows the points of a worker; null: of the fleet. */
  async show(worker) {
    this.worker = worker;
    this.#clear();
    await this.ask();
  }

  /** Begins to fetch; called when the first snapshot has arrived, so that a needed key is known. */
  start() {
    if (this.#started) return;
    this.#started = true;
    document.addEventListener("visibilitychange", () => this.ask());
    this.ask();
  }

  /** Fetches the missing points now and then periodically; pauses while the page is hidden. */
  async ask() {
    clearTimeout(this.#timer);
    if (document.hidden || this.#asking) return;
    this.#asking = true;
    await this.#once();
    this.#asking = false;
    this.#timer = setTimeout(() => this.ask(), INTERVAL_MS);
  }

  async #once() {
    const { worker } = this;
    const query = new URLSearchParams({ since: this.times.at(-1) ?? 0 });
    if (worker !== null) query.set("worker", worker);
    try {
      const options = { headers: feed.headers(), cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) };
      const answer = await fetch(`observe/history?${query}`, options);
      if (answer.status === 404 && worker !== null && worker === this.worker) this.worker = null; // the worker was removed
      if (!answer.ok) return this.#clear();
      const body = await answer.json();
      if (worker === this.worker) this.#add(body);
    } catch {
      // the banner already says that there is no connection
    }
    return undefined;
  }

  #clear() {
    this.times = [];
    this.series = {};
  }

  #add({ interval_s: interval, kept_s: kept, time, times, series, windows, workers }) {
    const first = this.times.findIndex((at) => at > time - kept);
    const old = first < 0 ? this.times.length : first;
    const before = this.times.slice(old);
    const merged = {};
    for (const name of new Set([...Object.keys(this.series), ...Object.keys(series)])) {
      const known = this.series[name]?.slice(old) ?? before.map(() => null);
      merged[name] = [...known, ...(series[name] ?? times.map(() => null))];
    }
    Object.assign(this, { times: [...before, ...times], series: merged, windows, workers, interval, now: time });
    this.#tell();
  }

  /** The points of the shown range: `times`, and a function that returns the values of a field. */
  view() {
    const from = this.now - this.range;
    const first = this.times.findIndex((at) => at > from);
    const start = first < 0 ? this.times.length : first;
    const times = this.times.slice(start);
    return { from, to: this.now, times, of: (name) => this.series[name]?.slice(start) ?? times.map(() => null) };
  }

  #tell() {
    this.dispatchEvent(new CustomEvent("history", { detail: this }));
  }
}

export const history = new History();
