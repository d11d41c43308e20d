// All panels of a job except the chart and the events.
import { expectedMs } from "./chart.js";
import { el, linkName, ms, ranges, reaction, WORDS } from "./dom.js";

const CAUSES = {
  none: "nothing",
  device: "slow devices",
  stage_imbalance: "uneven stages",
  sequence_imbalance: "uneven sequences",
  communication: "communication",
  host: "host",
};

// Links stay in place, as one of them may have the focus. Jobs come by name.
export function drawJobs(host, jobs, shown) {
  const known = new Map([...host.children].map((link) => [link.dataset.job, link]));
  const links = jobs.map(({ name, devices }) => {
    const bad = devices.fail_slow || devices.fail_stop;
    const words = bad ? "has slow or stopped devices" : "healthy";
    const link = known.get(name) ?? el("a", { "data-job": name }, el("span", { role: "img" }), name);
    known.delete(name);
    link.href = `#${encodeURIComponent(name)}`;
    link.ariaCurrent = name === shown ? "page" : null;
    link.firstChild.className = bad ? "dot bad" : "dot";
    link.firstChild.title = link.firstChild.ariaLabel = words;
    return link;
  });
  known.forEach((link) => link.remove());
  links.forEach((link, at) => {
    if (host.children[at] !== link) host.insertBefore(link, host.children[at] ?? null);
  });
}

function describe(verdict) {
  if (!verdict) return ["–", "no verdict"];
  if (verdict.status === "fail_stop") return ["✕", "stopped"];
  const factor = `${verdict.slowdown.toFixed(2)}×`;
  return [factor, WORDS[verdict.status]];
}

function cell(rank, verdict) {
  const [mark, words] = describe(verdict);
  const since = verdict?.since_step !== null && verdict?.since_step !== undefined;
  const title = [
    `rank ${rank}: ${words}${verdict && verdict.status !== "fail_stop" ? `, ${mark}` : ""}`,
    since ? `since step ${verdict.since_step}` : null,
    ...(verdict?.evidence ?? []),
  ];
  return el(
    `div.cell.${verdict?.status ?? "unknown"}`,
    { title: title.filter(Boolean).join("\n"), "data-rank": rank },
    el("small", {}, `rank ${rank}`),
    el("b", {}, mark),
    el("small", {}, words),
  );
}

export function drawHealth(host, layout, verdicts) {
  const known = new Map(verdicts.map((verdict) => [verdict.rank, verdict]));
  const working = new Set();
  const depth = Math.max(...layout.replicas.map((replica) => replica.stages.length));
  const table = el("table.heat", {}, el("caption.heard", {}, "Slowdown of each device"));
  const top = Array.from({ length: depth }, (_, i) => el("th", { scope: "col" }, `stage ${i}`));
  table.append(el("thead", {}, el("tr", {}, el("td"), ...top)));
  const body = el("tbody");
  layout.replicas.forEach((replica, index) => {
    const cells = replica.stages.map((stage) => {
      stage.ranks.forEach((rank) => working.add(rank));
      const boxes = stage.ranks.map((rank) => cell(rank, known.get(rank)));
      return el("td", {}, el("div.cells", {}, ...boxes));
    });
    body.append(el("tr", {}, el("th", { scope: "row" }, `replica ${index}`), ...cells));
  });
  const out = verdicts.filter((verdict) => !working.has(verdict.rank));
  if (out.length) {
    const boxes = out.map((verdict) => cell(verdict.rank, verdict));
    const all = el("td.unused", { colspan: depth }, el("div.cells", {}, ...boxes));
    body.append(el("tr", {}, el("th", { scope: "row" }, "not in use"), all));
  }
  table.append(body);
  host.replaceChildren(table);
  if (working.size <= 64) return;
  table.classList.add("dense");
  const ill = verdicts.filter((verdict) => verdict.status !== "healthy");
  host.append(el("ul.ill", {}, ...ill.map((verdict) => el("li", {}, inFull(verdict)))));
}

function inFull(verdict) {
  const { rank, status, slowdown, since_step: since, evidence } = verdict;
  const factor = status === "fail_stop" ? "" : `, ${slowdown.toFixed(2)}×`;
  const when = since === null ? "" : ` since step ${since}`;
  const why = evidence.length ? `: ${evidence.join("; ")}` : "";
  return `Rank ${rank}: ${WORDS[status]}${factor}${when}${why}`;
}

export function drawLinks(host, { links, counts }) {
  const all = Object.values(counts).reduce((sum, count) => sum + count, 0);
  const said = links.map((link) => {
    const since = link.since_step === null ? "" : ` since step ${link.since_step}`;
    return el("p.words", {}, `${linkName(link)}: ${WORDS[link.status]}, ${link.slowdown.toFixed(2)}×${since}`);
  });
  const summary = `${counts.healthy ?? 0} of ${all} links and groups healthy`;
  host.replaceChildren(...(all ? [el("p.words", {}, summary)] : []), ...said);
}

export function drawScale(host) {
  const swatch = (status) => el("span.swatch", {}, el(`i.${status}`), WORDS[status]);
  host.replaceChildren(...["healthy", "suspect", "fail_slow", "fail_stop"].map(swatch));
}

export function drawLayout(host, plan) {
  const rows = plan.layout.replicas.map((replica, index) => {
    const stages = replica.stages.map((stage) => {
      const [from, to] = stage.layers;
      const shares = stage.shares.map((share) => el("i", { style: `flex:${share}` }));
      const uneven = new Set(stage.shares).size > 1;
      const range = to - from === 1 ? null : el("span", {}, `${from}–${to - 1}`);
      return el(
        "div.stage",
        { style: `flex:${Math.max(to - from, 0.5)}` },
        el("b", {}, to - from === 1 ? `layer ${from}` : "layers ", range),
        el("small", {}, `rank${stage.ranks.length > 1 ? "s" : ""} ${ranges(stage.ranks)}`),
        uneven ? el("small", {}, `shares ${stage.shares.join(":")}`) : null,
        el("div.shares", { "aria-hidden": "true" }, ...shares),
      );
    });
    const quota = `${plan.quotas[index]} microbatches`;
    return el(
      "div.replica",
      {},
      el("div", {}, el("b", {}, `replica ${index}`), quota),
      el("div.stages", {}, ...stages),
    );
  });
  host.replaceChildren(...rows);
}

export function drawCause(host, diagnosis) {
  const bars = Object.entries(diagnosis.attribution)
    .filter(([cause]) => cause !== "none")
    .sort((a, b) => b[1] - a[1])
    .map(([cause, share]) => {
      const bar = el("i", { style: `width:${Math.max(0, Math.min(1, share)) * 100}%` });
      return el(
        "div.cause",
        {},
        el("span", {}, CAUSES[cause] ?? cause),
        el("span.track", {}, bar),
        el("span", {}, `${Math.round(share * 100)}%`),
      );
    });
  const words = diagnosis.detail.map((line) => el("p.words", {}, line));
  if (!bars.length) words.push(el("p.blank", {}, "No lost time has been attributed yet."));
  host.replaceChildren(...bars, ...words);
}

export function drawFacts(host, { job, verdicts, steps, diagnosis, reactions }) {
  const last = steps.at(-1);
  const healthy = verdicts.filter((v) => v.status === "healthy").length;
  const bad = verdicts.filter((v) => v.status === "fail_slow" || v.status === "fail_stop");
  const ratio = last && expectedMs(last) ? last.observed_ms / expectedMs(last) : null;
  const { rollout, planning } = job;
  const waiting = rollout && rollout.newest > rollout.active;
  const known = waiting ? `plan ${rollout.newest} is not applied yet` : (planning.advice?.summary ?? "applied");
  const answered = reactions.findLast((one) => one.applied !== null);
  const stuck = planning.state === "infeasible";
  const fact = (title, value, note, isBad = false, tone = isBad ? ".bad" : "") =>
    el(`div.card.fact${tone}`, {}, el("small", {}, title), el("strong", {}, value), el("span", {}, note));
  const names = bad.slice(0, 4).map((v) => `rank ${v.rank} ${WORDS[v.status]}`).join(", ");
  const more = bad.length > 4 ? ` and ${bad.length - 4} more` : "";
  host.replaceChildren(
    fact("Step", job.last_step < 0 ? "–" : `${job.last_step}`, job.backlog ? `${job.backlog} messages waiting` : job.last_step < 0 ? "no steps yet" : "up to date"),
    fact("Step time", ms(last?.observed_ms), ratio ? `${ratio.toFixed(2)}× the expected time` : "no prediction yet"),
    fact(
      "Devices",
      verdicts.length ? `${healthy} of ${verdicts.length} healthy` : "–",
      names + more || (verdicts.length ? "none slow, none stopped" : "no verdicts yet"),
      bad.length > 0,
    ),
    fact(
      "Plan",
      `${rollout?.active ?? 0}`,
      stuck ? planning.detail : known,
      stuck || Boolean(planning.advice),
    ),
    fact(
      "From fault to applied plan",
      answered?.seconds.total == null ? "–" : ms(1e3 * answered.seconds.total),
      answered ? reaction(answered) : "no plan for a fault yet",
      false,
      ".text",
    ),
    fact(
      "Main cause of lost time",
      diagnosis.steps ? CAUSES[diagnosis.root_cause] : "–",
      diagnosis.steps ? `${diagnosis.slowdown.toFixed(2)}× the ideal step` : "not enough steps yet",
      false,
      ".text",
    ),
  );
}
