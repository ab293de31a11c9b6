// Requests to this server: the key, JSON, and server-sent events. The key is in this module's memory and nowhere else.

let key = "";

export const hasKey = () => key !== "";
export function useKey(text) { key = text; }

function headers(more = {}) {
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

async function checked(response) {
  if (response.ok) return response;
  let message = `${response.status}`;
  try { message = (await response.json()).error.message; } catch { /* no JSON */ }
  throw new Refused(response.status, message);
}

export async function get(path) {
  return (await checked(await fetch(path, { headers: headers(), cache: "no-store" }))).json();
}

export async function send(method, path, body, signal) {
  const response = await fetch(path, {
    method, signal, headers: headers({ "Content-Type": "application/json" }),
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  await checked(response);
  return response.status === 204 ? null : response.json();
}

async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}

// [the response's headers, an iterator over the data of its events]
export async function stream(path, { method = "GET", body, signal } = {}) {
  const response = await checked(await fetch(path, {
    method, signal, cache: "no-store",
    headers: headers(body === undefined ? {} : { "Content-Type": "application/json" }),
    body: body === undefined ? undefined : JSON.stringify(body),
  }));
  return [response.headers, readEvents(response)];
}

// The dialog in which a key is typed; `changed` is called with it in use.
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
