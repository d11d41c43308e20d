// Step time over steps: observed, expected, applied plans, and devices that became slow.
import { el, ms, svg, WORDS } from "./dom.js";

const LEFT = 52;
const RIGHT = 12;
const TOP = 14;
const BOTTOM = 24;

function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 5, 10].map((f) => f * power).find((f) => f >= raw);
  const found = [];
  for (let at = Math.ceil(low / size) * size; at <= high + 1e-9; at += size) found.push(at);
  return found;
}

// By the step's own work, with the devices known to be slow; else by the plan.
export function expectedMs(step) {
  return step.expected_ms ?? step.predicted_ms ?? null;
}

// At most one point per pixel: each bucket keeps its slowest step, so that no spike is hidden.
function thin(steps, most) {
  if (steps.length <= most) return steps;
  const size = steps.length / most;
  return Array.from({ length: most }, (_, i) =>
    steps
      .slice(Math.floor(i * size), Math.floor((i + 1) * size))
      .reduce((a, b) => (b.observed_ms > a.observed_ms ? b : a)),
  );
}

function path(points) {
  let pen = "M";
  return points
    .map(([x, y]) => {
      if (y === null) {
        pen = "M";
        return "";
      }
      const part = `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
      pen = "L";
      return part;
    })
    .join("");
}

// Verdicts that name a device, by the step since which they hold.
function faultsByStep(verdicts, first, last) {
  const found = new Map();
  for (const verdict of verdicts) {
    const { status, since_step: step } = verdict;
    if (status !== "fail_slow" && status !== "fail_stop") continue;
    if (step !== null && step >= first && step <= last) {
      found.set(step, [...(found.get(step) ?? []), verdict]);
    }
  }
  return found;
}

export function drawChart(host, all, verdicts) {
  if (all.length < 2) {
    host.replaceChildren(el("p.blank", {}, "Waiting for the first steps."));
    return;
  }
  const width = host.clientWidth;
  const height = host.clientHeight;
  const steps = thin(all, Math.max(50, width - LEFT - RIGHT));
  const first = steps[0].step;
  const last = steps.at(-1).step;
  const values = steps.flatMap((s) => [s.observed_ms, expectedMs(s) ?? 0]);
  const sorted = [...values].sort((a, b) => a - b);
  // One outlier (a first step that compiles) must not flatten the rest.
  const high = Math.min(sorted.at(-1), 2.5 * sorted[Math.floor(0.9 * sorted.length)]) * 1.08;
  const x = (step) => LEFT + ((step - first) / (last - first || 1)) * (width - LEFT - RIGHT);
  const y = (value) => height - BOTTOM - (Math.min(value, high) / high) * (height - TOP - BOTTOM);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  const now = all.at(-1);
  picture.append(
    svg("title", {}, `Step ${now.step}: ${ms(now.observed_ms)}, expected ${ms(expectedMs(now))}`),
  );
  for (const value of ticks(0, high, 4)) {
    picture.append(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
    const label = { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" };
    picture.append(svg("text", label, value ? ms(value, high) : "0"));
  }
  for (const step of ticks(first, last, Math.min(8, Math.max(1, last - first)))) {
    const label = { x: x(step), y: height - 6, "text-anchor": "middle" };
    picture.append(svg("text", label, `${Math.round(step)}`));
  }
  steps.forEach((step, i) => {
    if (!i || step.plan_version === steps[i - 1].plan_version) return;
    const at = x(step.step);
    picture.append(svg("line", { class: "switch", x1: at, x2: at, y1: TOP, y2: height - BOTTOM }));
    picture.append(svg("text", { x: at + 4, y: TOP + 6 }, `plan ${step.plan_version}`));
  });
  for (const [step, named] of faultsByStep(verdicts, first, last)) {
    const at = x(step);
    const [{ rank, status }] = named;
    const label = named.length > 1 ? `${named.length} devices` : `rank ${rank} ${WORDS[status]}`;
    const side = at > width - 110 ? { x: at - 4, "text-anchor": "end" } : { x: at + 4 };
    picture.append(svg("line", { class: "fault", x1: at, x2: at, y1: TOP, y2: height - BOTTOM }));
    picture.append(svg("text", { class: "fault", ...side, y: height - BOTTOM - 6 }, label));
  }
  const expected = steps.map((s) => [x(s.step), expectedMs(s) ? y(expectedMs(s)) : null]);
  picture.append(svg("path", { class: "predicted", d: path(expected) }));
  picture.append(
    svg("path", { class: "observed", d: path(steps.map((s) => [x(s.step), y(s.observed_ms)])) }),
  );
  host.replaceChildren(picture);
  addTip(host, picture, steps, x, height);
}

let pointed = null; // the step of the tip, which outlives a picture that is drawn anew under it

function addTip(host, picture, steps, x, height) {
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: height - BOTTOM, visibility: "hidden" });
  const tip = el("div.tip", { hidden: "" });
  picture.append(cursor);
  host.append(tip);
  const nearest = (distance) => steps.reduce((a, b) => (distance(b) < distance(a) ? b : a));
  const show = (near) => {
    pointed = near.step;
    const place = x(near.step);
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    cursor.setAttribute("visibility", "visible");
    tip.hidden = false;
    const healthy = near.healthy_ms ? ` · if healthy ${ms(near.healthy_ms)}` : "";
    tip.textContent = `step ${near.step} · ${ms(near.observed_ms)} · expected ${ms(expectedMs(near))}${healthy}`;
    tip.style.left = `${Math.max(0, Math.min(place + 8, host.clientWidth - tip.offsetWidth - 4))}px`;
  };
  host.onpointermove = (event) => {
    const at = event.clientX - picture.getBoundingClientRect().left;
    show(nearest((step) => Math.abs(x(step.step) - at)));
  };
  host.onpointerleave = () => {
    pointed = null;
    cursor.setAttribute("visibility", "hidden");
    tip.hidden = true;
  };
  if (pointed !== null) show(nearest((step) => Math.abs(step.step - pointed)));
}
