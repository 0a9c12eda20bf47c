// Numbers, times and digests as people read them.

export const shortDigest = (digest) => digest.slice(0, 12);

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) {
    count /= 1000;
    unit += 1;
  }
  return `${count < 10 && unit > 0 ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.max(1, Math.round(value * 1000))} ms`;
  if (value < 10) return `${value.toFixed(2)} s`;
  return value < 120 ? `${Math.round(value)} s` : `${Math.round(value / 60)} min`;
}

export function rate(value) {
  if (!value) return "0";
  if (value < 10) return value.toFixed(1);
  return Math.round(value).toLocaleString("en");
}

export const whole = (value) => value.toLocaleString("en");

export const percent = (share) => `${Math.round(share * 100)}\u00a0%`;

/** Formats a time, with its day only if it is more than 12 hours ago. */
export function clock(atS) {
  if (Date.now() / 1000 - atS > 12 * 3600) return day(atS);
  return new Date(atS * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
}

export const day = (atS) => new Date(atS * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });

/** Formats a split {version: weight} as "v3" or "v2 10 % · v3 90 %". */
export function split(weights) {
  const entries = Object.entries(weights);
  if (entries.length === 1) return `v${entries[0][0]}`;
  const total = entries.reduce((sum, [, weight]) => sum + weight, 0);
  return entries.map(([version, weight]) => `v${version} ${percent(weight / total)}`).join(" · ");
}

export function plural(count, word) {
  return `${whole(count)} ${word}${count === 1 ? "" : "s"}`;
}

/** Shortens a long name in the middle, since its ends distinguish it. */
export function middle(text, length) {
  const letters = [...text];
  if (letters.length <= length) return text;
  const head = Math.ceil((length - 1) * 0.6);
  return `${letters.slice(0, head).join("")}…${letters.slice(letters.length - (length - 1 - head)).join("")}`;
}

/** Returns the end of a replica's id, which is enough to distinguish it. */
export const shortReplica = (id) => (id.length > 10 ? id.slice(-8) : id);
