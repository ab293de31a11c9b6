// Requests to this server: the key, JSON, and server-sent events. Only this module's memory holds the key.

// The path at which the server's application is mounted: "" for a server of its own.
const MOUNT = new URL("..", import.meta.url).pathname.slice(0, -1);

let key = "";

export const hasKey = () => key !== "";
export function useKey(text) { key = text; }

function headers(more = {}) {
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

// A refusal of the server: `status` of an answer, or `type` of an error within a stream.
export class Refused extends Error {
  constructor(status, message, { type, retryAfter } = {}) {
    super(message);
    Object.assign(this, { status, type, retryAfter });
  }
}

async function checked(response) {
  if (response.ok) return response;
  let message = `${response.status}`;
  try { message = (await response.json()).error.message; } catch { /* no JSON */ }
  throw new Refused(response.status, message, { retryAfter: response.headers.get("Retry-After") });
}

export async function get(path) {
  return (await checked(await fetch(MOUNT + path, { headers: headers(), cache: "no-store" }))).json();
}

export async function send(method, path, body, signal) {
  const response = await fetch(MOUNT + path, {
    method, signal, headers: headers({ "Content-Type": "application/json" }),
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  await checked(response);
  return response.status === 204 ? null : response.json();
}

// The events of a stream of bytes, as JSON. Comments (lines that begin with a colon) and fields other than `data` are
// skipped, an error event is thrown, and [DONE] becomes null, the last event.
export async function* readEvents(bytes) {
  const reader = bytes.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        if (line !== "" || !data.length) continue;
        const text = data.join("\n");
        data = [];
        if (text === "[DONE]") { yield null; return; }
        const event = JSON.parse(text);
        if (event.error) throw new Refused(undefined, event.error.message, { type: event.error.type ?? "" });
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// [the response's headers, an iterator over its events]. id: the request's id in the server.
export async function stream(path, { method = "GET", body, signal, id } = {}) {
  const more = body === undefined ? {} : { "Content-Type": "application/json" };
  if (id !== undefined) more["X-Request-Id"] = id;
  const response = await checked(await fetch(MOUNT + path, {
    method, signal, cache: "no-store", headers: headers(more), body: body === undefined ? undefined : JSON.stringify(body),
  }));
  return [response.headers, readEvents(response.body)];
}

// The dialog for a key; `changed` is called once the new key is in use.
export function keyDialog(changed) {
  const dialog = document.getElementById("key-dialog");
  const input = document.getElementById("key");
  const open = () => { input.value = ""; if (!dialog.open) dialog.showModal(); };
  document.getElementById("key-button").addEventListener("click", open);
  document.getElementById("key-cancel").addEventListener("click", () => dialog.close());
  document.getElementById("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    useKey(input.value.trim());
    input.value = "";
    dialog.close();
    changed();
  });
  return open;
}
