// The box: a prompt through the same API that everybody uses, its sequence followed in the events.

import { announce, number, runs } from "./format.js";
import { stream } from "./server.js";

const $ = (id) => document.getElementById(id);

export class Prompt {
  // mark(runs): the blocks to be outlined
  constructor(mark) {
    this.mark = mark;
    this.id = null;
    this.seen = null;
    this.block = "block"; // or what else the storage hands out
    this.running = null;
    $("try").addEventListener("submit", (event) => { event.preventDefault(); this.#send(); });
    $("stop").addEventListener("click", () => this.running?.abort());
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); this.#send(); }
    });
  }

  // The sequences of an update: ours among them?
  follow(sequences, block) {
    const mine = sequences.find((one) => one.id === this.id);
    if (!mine) return;
    this.block = block;
    this.seen = mine;
    this.mark(mine.runs);
    this.#tell();
  }

  #tell() {
    const one = this.seen;
    const blocks = one ? ` in ${number(one.blocks)} ${this.block}s: ${one.hidden_runs ? "… " : ""}${runs(one.runs)}` : "";
    const cached = this.cached ? `, ${number(this.cached)} of the prompt's from the cache` : "";
    $("try-status").textContent = `${number(this.count)} tokens generated${cached}${blocks}${this.end}`;
  }

  async #send() {
    if (this.running) return;
    this.running = new AbortController();
    this.id = this.seen = null;
    this.count = this.cached = 0;
    this.end = ""; // kept: updates of the sequence may still come behind it
    $("send").disabled = true;
    $("stop").disabled = false;
    $("answer").textContent = "";
    $("try-status").textContent = "waiting for the first token …";
    try {
      const body = { prompt: $("prompt").value, max_tokens: Number($("max-tokens").value) || 16, stream: true,
        stream_options: { include_usage: true } };
      const [headers, events] = await stream("/v1/completions", { method: "POST", body, signal: this.running.signal });
      this.id = headers.get("X-Request-Id");
      let reason = "";
      for await (const data of events) {
        if (data === "[DONE]") break;
        const message = JSON.parse(data);
        if (message.error) throw new Error(message.error.message);
        this.cached = message.usage?.prompt_tokens_details?.cached_tokens ?? this.cached;
        for (const choice of message.choices) {
          this.count += 1;
          $("answer").append(choice.text);
          reason = choice.finish_reason ?? reason;
        }
        $("answer").scrollTop = $("answer").scrollHeight;
        this.#tell();
      }
      this.end = reason ? `; ended: ${reason}` : "";
      this.#tell();
      announce("The answer is complete.");
    } catch (error) {
      this.id = null; // what comes of it later would hide why it ended
      $("try-status").textContent = this.running.signal.aborted ? "stopped" : error.message;
    }
    this.running = null;
    $("send").disabled = false;
    $("stop").disabled = true;
  }
}
