// The page: the list of jobs, and the selected job with live updates.
import { drawChart } from "./chart.js";
import { el } from "./dom.js";
import { addToLog } from "./log.js";
import { drawCause, drawFacts, drawHealth, drawLayout, drawLinks, drawScale } from "./panels.js";
import { follow, get, Unauthorized } from "./stream.js";

const $ = (id) => document.getElementById(id);
const KEEP_STEPS = 5000;

let shown = null; // name of the selected job
let stop = () => {};
let data = null;
let timer = null;
let tookMs = 0; // the last refresh, drawing included

function theme(name) {
  document.documentElement.dataset.theme = name;
  localStorage.setItem("resihp-theme", name);
  if (data) draw();
}

function state(name) {
  $("link").dataset.state = name;
  $("link").textContent = { live: "live", away: "disconnected", waiting: "connecting" }[name];
}

function only(id) {
  for (const part of ["token", "empty", "job"]) $(part).hidden = part !== id;
}

async function loadJobs() {
  const { jobs } = await get("/jobs");
  const wanted = decodeURIComponent(location.hash.slice(1));
  const names = jobs.map((job) => job.name);
  const name = names.includes(wanted) ? wanted : (names.at(-1) ?? null);
  $("jobs").replaceChildren(
    ...jobs.map((job) => {
      const bad = job.devices.fail_slow || job.devices.fail_stop;
      return el(
        "a",
        { href: `#${encodeURIComponent(job.name)}`, "aria-current": job.name === name ? "page" : null },
        el(`span.dot${bad ? ".bad" : ""}`, { title: bad ? "has slow or stopped devices" : "healthy" }),
        job.name,
      );
    }),
  );
  if (name !== shown) await show(name);
  if (name === null) only("empty");
}

async function show(name) {
  stop();
  shown = name;
  data = null;
  $("log").replaceChildren();
  if (name === null) return;
  await refresh();
  const path = `/jobs/${encodeURIComponent(name)}/events?replay=true`;
  stop = follow(path, (event) => take(name, event), state);
}

async function refresh() {
  const begunMs = performance.now();
  const name = shown;
  const path = `/jobs/${encodeURIComponent(name)}`;
  const after = data?.steps.at(-1)?.step ?? -1;
  const [job, { verdicts }, links, diagnosis, { steps }, { reactions }] = await Promise.all([
    get(path),
    get(`${path}/verdicts`),
    get(`${path}/links`),
    get(`${path}/diagnosis`),
    get(`${path}/steps?after=${after}&limit=${KEEP_STEPS}`),
    get(`${path}/reactions`),
  ]);
  if (name !== shown) return;
  const version = job.rollout?.active ?? job.plan.version;
  const active = job.plan.version === version ? job.plan : await get(`${path}/plan/${version}`);
  if (name !== shown) return;
  data = { job, active, verdicts, links, diagnosis, reactions, steps: merged(data?.steps ?? [], steps) };
  only("job");
  draw();
  tookMs = performance.now() - begunMs;
}

// Two overlapping refreshes may bring the same steps.
function merged(known, fresh) {
  const last = known.at(-1)?.step ?? -1;
  return [...known, ...fresh.filter((step) => step.step > last)].slice(-KEEP_STEPS);
}

function draw() {
  const { job, active, verdicts, links, diagnosis, steps } = data;
  drawFacts($("facts"), data);
  drawChart($("chart"), steps, verdicts);
  drawHealth($("health"), active.layout, verdicts);
  drawLinks($("links"), links);
  drawLayout($("layout"), job.plan);
  drawCause($("cause"), diagnosis);
  const waiting = job.rollout && job.rollout.newest > job.rollout.active;
  $("plan-note").textContent = `plan ${job.plan.version}${waiting ? ", not applied yet" : ""} · ${job.plan.schedule}`;
  document.title = `${shown} · ResiHP`;
}

function take(name, event) {
  if (name !== shown) return;
  if (event.kind === "deleted") return void loadJobs().catch(failed);
  if (event.kind !== "step") addToLog($("log"), event);
  // Events come in bursts: one refresh for all of them, and time for others after a long one.
  timer ??= setTimeout(
    () => {
      timer = null;
      refresh().catch(failed);
    },
    Math.max(400, 4 * tookMs),
  );
}

function failed(error) {
  if (error instanceof Unauthorized) only("token");
  else state("away");
}

async function poll() {
  try {
    await loadJobs();
    if ($("link").dataset.state !== "live" || shown === null) state("live");
  } catch (error) {
    failed(error);
  }
  setTimeout(poll, 3000);
}

$("origin").textContent = location.origin;
$("theme").addEventListener("click", () =>
  theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"),
);
$("token").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("resihp-token", new FormData(event.target).get("token"));
  loadJobs().catch(failed);
});
addEventListener("hashchange", () => loadJobs().catch(failed));
addEventListener("resize", () => data && draw());
drawScale($("scale"));
theme(
  localStorage.getItem("resihp-theme") ??
    (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"),
);
poll();
