// Formats numbers for display. Pure.

const whole = new Intl.NumberFormat("en");

/** 12345 -> "12,345". */
export const count = (value) => whole.format(value);

/** Three digits at most: 0.0123, 1.23, 12.3, 123. */
function digits(value) {
  if (value >= 100) return String(Math.round(value));
  if (value >= 10) return value.toFixed(1);
  return value.toFixed(2);
}

function scaled(value, units) {
  let [size, name] = units[0];
  for (const [next, called] of units) if (value >= next) [size, name] = [next, called];
  return `${value === 0 ? "0" : digits(value / size)} ${name}`;
}

/** Bytes: "1.23 MB". */
export const bytes = (value) => scaled(value, [[1, "B"], [1e3, "kB"], [1e6, "MB"], [1e9, "GB"], [1e12, "TB"]]);

/** A rate in GB/s: "1.23 GB/s", "45.0 MB/s". */
export function rate(gbPerS) {
  if (gbPerS < 5e-7) return "0 GB/s";
  return scaled(gbPerS, [[1e-6, "kB/s"], [1e-3, "MB/s"], [1, "GB/s"]]);
}

/** Seconds: "850 µs", "12.3 ms", "1.23 s". */
export function seconds(value) {
  if (value === 0) return "0 ms";
  if (value < 1e-3) return `${Math.round(value * 1e6)} µs`;
  return value < 1 ? `${digits(value * 1e3)} ms` : `${digits(value)} s`;
}

/** Seconds without trailing zeros, for an axis: "2.5 s". */
export const tick = (value) => seconds(value).replace(/^([0-9.]+)/, (text) => String(Number(text)));

/** A duration in seconds: "12 s", "3 min", "2 h 5 min", "4 d 1 h". */
export function span(value) {
  const s = Math.max(0, Math.floor(value));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

/** A share, 0 to 1, in percent: "12%", "0.4%". */
export function percent(share) {
  const value = share * 100;
  return value > 0 && value < 1 ? `${value.toFixed(1)}%` : `${Math.round(value)}%`;
}

/** Tokens per second. */
export const speed = (value) => (value === 0 ? "0" : value >= 100 ? count(Math.round(value)) : value.toFixed(1));

/** The quantile `share` of a sorted list; null for an empty list. */
export function quantile(sorted, share) {
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * share))] : null;
}
