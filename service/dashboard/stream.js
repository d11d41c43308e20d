// API requests with the token, and server-sent events over fetch (an EventSource cannot send
// the token), resumed after an interruption.
const token = () => sessionStorage.getItem("resihp-token");
const headers = () => (token() ? { Authorization: `Bearer ${token()}` } : {});

export class Unauthorized extends Error {}

// The browser's cache makes the request conditional: what is unchanged is not sent again.
export async function get(path) {
  const answer = await fetch(`/v1${path}`, { headers: headers(), cache: "no-cache" });
  if (answer.status === 401) throw new Unauthorized();
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

export function follow(path, onEvent, onState) {
  const stop = new AbortController();
  let last = null;
  const run = async () => {
    while (!stop.signal.aborted) {
      try {
        const more = last ? { "Last-Event-ID": last } : {};
        const answer = await fetch(`/v1${path}`, {
          headers: { ...headers(), ...more },
          signal: stop.signal,
        });
        if (!answer.ok) throw new Error(String(answer.status));
        onState("live");
        const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
        let rest = "";
        for (;;) {
          const { value, done } = await reader.read();
          if (done) break;
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
      } catch (error) {
        if (stop.signal.aborted) return;
      }
      onState("away");
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  };
  run();
  return () => stop.abort();
}
