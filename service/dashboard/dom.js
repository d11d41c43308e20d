// Elements without a template engine. Text goes in as text, never as markup.
export function el(name, attributes = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function svg(tag, attributes = {}, text = null) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  return element;
}

// What the page remembers; while it is open only where the browser refuses its storage.
const kept = new Map();

export function recall(storage, key) {
  try {
    return window[storage].getItem(key);
  } catch {
    return kept.get(key) ?? null;
  }
}

export function remember(storage, key, value) {
  try {
    window[storage].setItem(key, value);
  } catch {
    kept.set(key, value);
  }
}

// `largest` of the values shown together determines the unit of all.
export const ms = (value, largest = value) =>
  value === null || value === undefined
    ? "–"
    : largest >= 10000
      ? `${(value / 1000).toFixed(1)} s`
      : `${value >= 100 ? Math.round(value) : value.toFixed(1)} ms`;

export const WORDS = {
  healthy: "healthy",
  suspect: "suspect",
  inconclusive: "unclear",
  fail_slow: "slow",
  fail_stop: "stopped",
};

export function ranges(numbers) {
  const sorted = [...numbers].sort((a, b) => a - b);
  const parts = [];
  for (let i = 0; i < sorted.length; ) {
    let j = i;
    while (j + 1 < sorted.length && sorted[j + 1] === sorted[j] + 1) j += 1;
    parts.push(j > i + 1 ? `${sorted[i]}–${sorted[j]}` : sorted.slice(i, j + 1).join(", "));
    i = j + 1;
  }
  return parts.join(", ");
}

export const linkName = ({ rank, peer, group, more }) =>
  group.length ? `Group of ranks ${ranges(group)}${more ? ` and ${more} more` : ""}` : `Link of ranks ${rank} and ${peer}`;

export const named = ({ ranks, more }) =>
  `${ranks.length > 1 ? "Ranks" : "Rank"} ${ranges(ranks)}${more ? ` and ${more} more` : ""}`;

const PARTS = { detect: "detected", plan: "planned", apply: "applied" };

// Seconds from a fault to its verdict, to the plan, and to its application.
export function reaction(document) {
  if (!document) return "";
  const known = Object.entries(PARTS).filter(([part]) => document.seconds[part] !== null);
  const words = known.map(([part, word]) => `${word} in ${ms(1e3 * document.seconds[part])}`);
  return `${named(document)}: ${words.join(", ")}`;
}
