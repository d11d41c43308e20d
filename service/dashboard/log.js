// Events: verdicts, plans and their acknowledgements, newest first.
import { el, linkName, ms, named, ranges, reaction, WORDS } from "./dom.js";

const MOST = 300;

function words(event) {
  switch (event.kind) {
    case "verdict": {
      const { rank, status, slowdown, since_step: since, evidence } = event.verdict;
      const factor = status === "fail_slow" ? ` by ${slowdown.toFixed(2)}×` : "";
      const when = since === null ? "" : ` since step ${since}`;
      return [status, WORDS[status], `Rank ${rank} is ${WORDS[status]}${factor}${when}`, evidence.join("; ")];
    }
    case "link": {
      const { status, slowdown, since_step: since, evidence } = event.link;
      const slow = status === "fail_slow" ? ` by ${slowdown.toFixed(2)}×` : "";
      const text = `${linkName(event.link)} is ${WORDS[status]}${slow}${since === null ? "" : ` since step ${since}`}`;
      return [status, WORDS[status], text, evidence.join("; ")];
    }
    case "plan": {
      const { version, from_step: from, gap, reason } = event.plan;
      const time = event.expected_ms ? `, expected step time ${ms(event.expected_ms)}` : "";
      const bound = gap > 0 ? `, ${(gap * 100).toFixed(1)}% above the lower bound` : "";
      return ["plan", `plan ${version}`, `New plan from step ${from}${time}${bound}`, reason.join("; ")];
    }
    case "plan_applied":
      return ["plan", `plan ${event.version}`, `The ranks work under plan ${event.version}`, reaction(event.reaction)];
    case "planning":
      if (event.state === "advised") return ["plan", "advice", event.advice.summary, event.detail];
      return event.state === "infeasible"
        ? ["error", "no plan", event.detail, `binding constraint: ${event.constraint}`]
        : ["", "layout kept", event.detail, ""];
    case "failure":
      return ["fail_stop", "failure", `${named(event)} reported stopped${event.reported_by === null ? "" : ` by rank ${event.reported_by}`}`, event.detail];
    case "joiner":
      return ["", "joiner", `${named(event)} ready to join`, ""];
    case "error":
      return ["error", "error", `A message was skipped (${event.during})`, event.detail];
    case "probe":
      return ["", "probe", `${event.probe} probe on ranks ${event.rank} and ${event.reference}`, ""];
    case "probe_result":
      return ["", "probe", `Rank ${event.rank}: ${event.detail}`, ""];
    case "registered":
      return ["", "job", `Registered as ${event.job}`, ""];
    default:
      return ["", event.kind, "", ""];
  }
}

// One line for all refusals of a plan, and one for its acknowledgements so far: the line of a plan
// moves up with each event that adds to it.
function refusal(old, event) {
  const ranks = [...(old?.dataset.ranks.split(",").map(Number) ?? []), event.rank];
  const text = `Plan ${event.version} refused by ${new Set(ranks).size === 1 ? "rank" : "ranks"} ${ranges(new Set(ranks))}`;
  const item = line(event.at, ["error", "refused", text, event.detail]);
  item.dataset.ranks = ranks.join(",");
  return item;
}

function answers(old, event) {
  const longest = Math.max(event.pause_ms ?? 0, Number(old?.dataset.pause ?? 0));
  const pause = longest > 0 ? `, paused ${ms(longest)} at most` : "";
  const text = `Plan ${event.version} answered by ${event.ranks} of ${event.of} ranks${pause}`;
  const item = line(event.at, ["", "applied", text, ""]);
  item.dataset.pause = longest;
  return item;
}

function addAnswer(host, event, draw) {
  const key = `${event.kind}-${event.version}`;
  const old = host.querySelector(`[data-answer="${key}"]`);
  const item = draw(old, event);
  item.dataset.answer = key;
  old?.remove();
  host.prepend(item);
}

const CLOCK = { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" };
const today = () => new Date().toDateString();
let dated = today(); // the day on which the times were written

// With the date if that is not today's.
function short(time) {
  const date = time.toDateString() === today() ? {} : { month: "short", day: "numeric" };
  return time.toLocaleString([], { ...date, ...CLOCK });
}

// Writes the times anew once the day has changed.
export function dateLog(host) {
  if (dated === today()) return;
  dated = today();
  for (const time of host.querySelectorAll("time")) {
    time.textContent = short(new Date(time.dateTime));
  }
}

function line(at, [tone, tag, text, detail]) {
  const time = new Date(at * 1000);
  const inFull = { dateStyle: "full", timeStyle: "long", hourCycle: "h23" };
  const when = { datetime: time.toISOString(), title: time.toLocaleString([], inFull) };
  return el(
    "li",
    {},
    el("time", when, short(time)),
    el(`span.tag${tone ? `.${tone}` : ""}`, {}, tag),
    el("div", {}, el("p", {}, text), detail ? el("p", {}, detail) : null),
  );
}

export function addToLog(host, event) {
  if (event.kind === "ack") addAnswer(host, event, refusal);
  else if (event.kind === "acks") addAnswer(host, event, answers);
  else host.prepend(line(event.at, words(event)));
  while (host.children.length > MOST) host.lastChild.remove();
}
