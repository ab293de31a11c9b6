// One answer: a request through the public API, read as a stream and measured.

import { Refused, stream } from "./server.js";

export function newId() {
  return `page-${[...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

export class Answer {
  // path: of the API; body: without the fields of streaming. tell(answer): called with every change.
  constructor(path, body, tell) {
    this.path = path;
    this.body = { ...body, stream: true, stream_options: { include_usage: true } };
    this.tell = tell;
    this.id = newId();
    this.text = this.thoughts = "";
    this.events = 0; // with text: about the number of tokens, until the usage is known
    this.usage = this.reason = this.stopReason = null;
    this.isDone = this.isStopped = false;
    this.stopping = new AbortController();
  }

  get count() { return this.usage?.completion_tokens ?? this.events; }
  get firstS() { return this.firstAt === undefined ? null : (this.firstAt - this.begunAt) / 1000; }
  get speed() { // tokens a second, without the first token
    const spent = (this.lastAt - this.firstAt) / 1000;
    return spent > 0 && this.count > 1 ? (this.count - 1) / spent : null;
  }

  stop() { this.isStopped = true; this.stopping.abort(); }

  // Reads to the end. Throws a refusal of the server, and an error if the connection ends before the answer does.
  async read() {
    this.begunAt = performance.now();
    try {
      const { path, body, id } = this;
      const [headers, events] = await stream(path, { method: "POST", body, id, signal: this.stopping.signal });
      this.id = headers.get("X-Request-Id") ?? this.id;
      for await (const event of events) {
        if (event === null) { this.isDone = true; break; }
        this.#take(event);
        this.tell(this);
      }
    } catch (error) {
      if (!this.isStopped) throw error;
    }
    if (!this.isDone && !this.isStopped) throw new Refused(undefined, "the connection ended before the answer did", { type: "internal_error" });
  }

  #take(event) {
    if (event.usage) this.usage = event.usage;
    for (const choice of event.choices ?? []) {
      const text = choice.text ?? choice.delta?.content ?? "";
      const thought = choice.delta?.reasoning_content ?? "";
      if (text || thought) {
        this.lastAt = performance.now();
        this.firstAt ??= this.lastAt;
        this.events += 1;
      }
      this.text += text;
      this.thoughts += thought;
      this.reason = choice.finish_reason ?? this.reason;
      this.stopReason = choice.stop_reason ?? this.stopReason;
    }
  }
}
