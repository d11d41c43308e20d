// The page: the list of jobs, and the selected job with live updates.
import { drawChart } from "./chart.js";
import { recall, remember } from "./dom.js";
import { addToLog, dateLog } from "./log.js";
import {
  drawCause, drawFacts, drawHealth, drawJobs, drawLayout, drawLinks, drawScale,
} from "./panels.js";
import { follow, get, Unauthorized } from "./stream.js";

const $ = (id) => document.getElementById(id);
const KEEP_STEPS = 5000;

let shown = null; // the selected job, see `show`
let isReached = null; // whether the last requests were answered; null before the first

const prefersDark = matchMedia("(prefers-color-scheme: dark)");

// The theme chosen on this page, else that of the system.
function drawTheme() {
  const chosen = recall("localStorage", "resihp-theme");
  document.documentElement.dataset.theme = chosen ?? (prefersDark.matches ? "dark" : "light");
}

// With a job shown, live is what its stream is: answers to polls alone prove nothing of it.
function drawState() {
  const calm = shown ? shown.stream : isReached ? "live" : "waiting";
  const name = isReached === false || shown?.hasFailed ? "away" : calm;
  $("link").dataset.state = name;
  $("link").textContent = { live: "live", away: "disconnected", waiting: "connecting" }[name];
}

function only(id) {
  for (const part of ["token", "empty", "job"]) $(part).hidden = part !== id;
}

// Name of the job in the address; "" for one that cannot be read.
function wanted() {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return "";
  }
}

async function loadJobs() {
  const { jobs } = await get("/jobs");
  const names = jobs.map((job) => job.name);
  const present = [wanted(), shown?.name].find((each) => names.includes(each));
  const name = present ?? names.at(-1) ?? null;
  drawJobs($("jobs"), jobs, name);
  if (name !== (shown?.name ?? null)) show(name);
  if (name === null) only("empty");
}

// name       of the job
// data       what is drawn; null before the first answer
// text       all of it but the steps before the last, to see a change
// stream     state of its event stream: waiting, live or away
// isBusy     whether a refresh is in flight, or has been until just now
// isDue      whether another one was asked for meanwhile
// hasFailed  whether the last one has
// stop       ends the stream
function show(name) {
  shown?.stop();
  $("log").replaceChildren();
  shown = null;
  if (name === null) return;
  const view = {
    name, data: null, text: "", stream: "waiting", isBusy: false, isDue: false, hasFailed: false,
  };
  const path = `/jobs/${encodeURIComponent(name)}/events?replay=true`;
  const changed = (state) => {
    view.stream = state;
    drawState();
  };
  view.stop = follow(path, (event) => take(view, event), changed);
  shown = view;
}

// One at a time. Events come in bursts: those that come meanwhile and shortly after share the next
// one, and after a long one there is time for others.
async function refresh(view) {
  view.isDue = view.isBusy;
  if (view.isBusy) return;
  view.isBusy = true;
  const begunMs = performance.now();
  let restMs = 400;
  try {
    await load(view);
    view.hasFailed = false;
    restMs = Math.max(restMs, 4 * (performance.now() - begunMs));
  } catch (error) {
    view.hasFailed = true;
    if (view === shown) throw error;
  } finally {
    setTimeout(() => {
      view.isBusy = false;
      if (view.isDue && view === shown) attempt(() => refresh(view));
    }, restMs);
  }
}

async function load(view) {
  const path = `/jobs/${encodeURIComponent(view.name)}`;
  const [job, { verdicts }, links, diagnosis, steps, { reactions }] = await Promise.all([
    get(path),
    get(`${path}/verdicts`),
    get(`${path}/links`),
    get(`${path}/diagnosis`),
    stepsBeyond(view.data?.steps ?? [], path),
    get(`${path}/reactions`),
  ]);
  const version = job.rollout?.active ?? job.plan.version;
  const active = job.plan.version === version ? job.plan : await get(`${path}/plan/${version}`);
  if (view !== shown) return;
  const text = JSON.stringify([job, active, verdicts, links, diagnosis, reactions, steps.at(-1)]);
  only("job");
  if (text === view.text) return; // so that marked text and tips stay
  view.data = { job, active, verdicts, links, diagnosis, reactions, steps };
  view.text = text;
  draw(view);
}

// The known steps and newer ones. The last known step is asked for again: if it is gone or was done
// anew, the job has gone back, and all steps are asked for.
async function stepsBeyond(known, path) {
  const last = known.at(-1);
  const after = last ? last.step - 1 : -1;
  const { steps } = await get(`${path}/steps?after=${after}&limit=${KEEP_STEPS}`);
  if (last && steps[0]?.at !== last.at) return stepsBeyond([], path);
  return [...known.slice(0, -1), ...steps].slice(-KEEP_STEPS);
}

function draw({ name, data }) {
  const { job, active, verdicts, links, diagnosis, steps } = data;
  drawFacts($("facts"), data);
  drawChart($("chart"), steps, verdicts);
  drawHealth($("health"), active.layout, verdicts);
  drawLinks($("links"), links);
  drawLayout($("layout"), job.plan);
  drawCause($("cause"), diagnosis);
  const waiting = job.rollout && job.rollout.newest > job.rollout.active;
  $("plan-note").textContent = `plan ${job.plan.version}${waiting ? ", not applied yet" : ""} · ${job.plan.schedule}`;
  document.title = `${name} · ResiHP`;
}

function take(view, event) {
  if (view !== shown) return;
  if (event.kind === "deleted") return void attempt(update);
  if (event.kind !== "step") addToLog($("log"), event);
  attempt(() => refresh(view));
}

// Not all that changes is an event: a diagnosis follows some time behind the steps.
async function update() {
  await loadJobs();
  if (shown) await refresh(shown);
}

async function attempt(work) {
  try {
    await work();
    isReached = true;
  } catch (error) {
    isReached = false;
    if (error instanceof Unauthorized) only("token");
    else if (shown && !shown.data) only(null); // not the panels of another job
  }
  drawState();
}

async function poll() {
  dateLog($("log"));
  if (!document.hidden) await attempt(update);
  setTimeout(poll, 3000);
}

$("origin").textContent = new URL(".", location.href).href.replace(/\/$/, "");
$("theme").addEventListener("click", () => {
  const { theme } = document.documentElement.dataset;
  remember("localStorage", "resihp-theme", theme === "dark" ? "light" : "dark");
  drawTheme();
});
prefersDark.addEventListener("change", drawTheme);
$("token").addEventListener("submit", (event) => {
  event.preventDefault();
  remember("sessionStorage", "resihp-token", new FormData(event.target).get("token"));
  attempt(update);
});
addEventListener("hashchange", () => attempt(update));
addEventListener("resize", () => shown?.data && draw(shown));
document.addEventListener("visibilitychange", () => document.hidden || attempt(update));
drawScale($("scale"));
drawTheme();
poll();
