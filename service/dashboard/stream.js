// API requests with the token, and server-sent events over fetch (an EventSource cannot send
// the token), resumed after an interruption. Addresses are relative to the page: a proxy may serve
// it under a prefix.
import { recall } from "./dom.js";

const token = () => recall("sessionStorage", "resihp-token");
const headers = () => (token() ? { Authorization: `Bearer ${token()}` } : {});

const SILENT_MS = 25_000; // the sidecar sends something on a stream every 5 to 10 s

export class Unauthorized extends Error {}

// The browser's cache makes the request conditional: what is unchanged is not sent again.
export async function get(path) {
  const signal = AbortSignal.timeout(SILENT_MS);
  const answer = await fetch(`v1${path}`, { headers: headers(), cache: "no-cache", signal });
  if (answer.status === 401) throw new Unauthorized();
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

// Only while the page is seen: a browser has six connections to a sidecar for all its pages.
export function follow(path, onEvent, onState) {
  const ended = new AbortController();
  let request = null;
  let last = null;
  let seen = () => {};

  async function read() {
    let silent = null;
    const heard = () => {
      clearTimeout(silent);
      silent = setTimeout(() => request.abort(), SILENT_MS);
    };
    heard();
    try {
      const more = last ? { "Last-Event-ID": last } : {};
      const answer = await fetch(`v1${path}`, {
        headers: { ...headers(), ...more },
        cache: "no-store",
        signal: request.signal,
      });
      if (!answer.ok) throw new Error(String(answer.status));
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done || ended.signal.aborted) break;
        heard();
        onState("live"); // not by the head alone: a proxy may hold back what follows
        const blocks = (rest + value).split("\n\n");
        rest = blocks.pop();
        for (const block of blocks) {
          const fields = Object.fromEntries(
            block.split("\n").map((line) => line.split(/: (.*)/s).slice(0, 2)),
          );
          if (fields.id) last = fields.id;
          if (fields.data) onEvent(JSON.parse(fields.data));
        }
      }
    } finally {
      clearTimeout(silent);
    }
  }

  async function run() {
    for (;;) {
      while (document.hidden && !ended.signal.aborted) await new Promise((resolve) => (seen = resolve));
      if (ended.signal.aborted) return;
      request = new AbortController();
      await read().catch(() => {});
      if (ended.signal.aborted) return;
      onState(document.hidden ? "waiting" : "away");
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }

  const change = () => (document.hidden ? request?.abort() : seen());
  document.addEventListener("visibilitychange", change, { signal: ended.signal });
  run();
  return () => {
    ended.abort();
    request?.abort();
    seen();
  };
}
