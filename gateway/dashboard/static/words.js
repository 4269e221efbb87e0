// Numbers and times as people read them.

export function number(value, digits = 0) {
  return typeof value === "number" ? value.toFixed(digits) : "–";
}

export const milliseconds = (value) => (typeof value === "number" ? `${value.toFixed(value < 100 ? 1 : 0)} ms` : "–");

export const percentiles = (part) => [part.p50, part.p95, part.p99].map((value) => number(value, value < 100 ? 1 : 0)).join(" · ");

export const short = (id) => (typeof id === "string" ? id.slice(0, 8) : "–");

const CLOCK = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
export const clock = (ms) => CLOCK.format(ms);

export function median(values) {
  if (values.length === 0) return null;
  const sorted = [...values].sort((one, other) => one - other);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}
