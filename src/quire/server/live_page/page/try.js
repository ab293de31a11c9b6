// The "Try it" box: a chat by the model's template, or a raw completion, through the public API; the request is then
// followed in the events.

import { Answer } from "./answer.js";
import { announce, make, number, percent, runs } from "./format.js";
import { answerWords, endWords, errorWords, phaseWords } from "./words.js";

const $ = (id) => document.getElementById(id);
const MODES = ["chat", "completion"];
const NUMBERS = ["temperature", "top_p", "top_k", "seed", "repetition_penalty"];
const ESCAPES = { "\\n": "\n", "\\t": "\t", "\\\\": "\\" };

const isAtEnd = (box) => box.scrollHeight - box.scrollTop - box.clientHeight < 40;

// The fields' values by the API's names. Throws an error with a message if a field is not a number.
function parameters() {
  const found = {};
  const read = (id, name) => {
    const input = $(id);
    if (input.validity.badInput) throw new Error(`Expected a number in “${input.labels[0].textContent}”.`);
    if (input.value !== "") found[name] = Number(input.value);
  };
  read("max-tokens", "max_tokens");
  for (const name of NUMBERS) read(`p-${name}`, name);
  const stops = $("p-stop").value.split("\n").filter((line) => line !== "");
  if (stops.length) found.stop = stops.map((line) => line.replace(/\\[nt\\]/g, (two) => ESCAPES[two]));
  return found;
}

export class Try {
  // mark(runs): outlines blocks
  constructor(mark) {
    this.mark = mark;
    this.mode = "chat";
    this.messages = []; // of the conversation, without the system prompt
    this.running = null;
    this.seen = null; // its sequence in the newest update
    this.block = "block"; // the storage's name of a block
    this.isChosen = false; // the user has chosen a mode
    $("try").addEventListener("submit", (event) => { event.preventDefault(); this.#send(); });
    $("stop").addEventListener("click", () => this.running?.stop());
    $("new-chat").addEventListener("click", () => this.#clear());
    $("try").addEventListener("keydown", (event) => {
      const isText = event.target.id === "message" || event.target.id === "prompt";
      const isOne = event.target.id === "message" && !event.shiftKey;
      if (!isText || event.key !== "Enter" || event.isComposing || !(isOne || event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      this.#send();
    });
    for (const mode of MODES) $(`tab-${mode}`).addEventListener("click", () => { this.isChosen = true; this.#choose(mode); });
    $("tabs").addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, Home: -MODES.length, End: MODES.length }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      const at = MODES.indexOf(this.mode) + step;
      this.isChosen = true;
      this.#choose(MODES[Math.abs(step) > 1 ? (step > 0 ? MODES.length - 1 : 0) : (at + MODES.length) % MODES.length]);
      $(`tab-${this.mode}`).focus();
    });
    this.#choose("chat");
  }

  #choose(mode) {
    this.mode = mode;
    for (const one of MODES) {
      $(`tab-${one}`).setAttribute("aria-selected", `${one === mode}`);
      $(`tab-${one}`).tabIndex = one === mode ? 0 : -1;
      for (const part of document.querySelectorAll(`.of-${one}`)) part.hidden = one !== mode;
    }
    $("try-panel").setAttribute("aria-labelledby", `tab-${mode}`);
    this.#hint();
  }

  // Whether the model has a chat template; without one the raw completion serves it better.
  setTemplate(hasTemplate) {
    if (this.hasTemplate === hasTemplate) return;
    this.hasTemplate = hasTemplate;
    if (!hasTemplate && !this.isChosen) this.#choose("completion");
    this.#hint();
  }

  #hint() { $("no-template").hidden = this.mode !== "chat" || this.hasTemplate !== false; }

  // Finds our sequence among those of an update.
  follow(sequences, block) {
    const mine = this.running && sequences.find((one) => one.id === this.running.id);
    if (!mine) return;
    this.block = block;
    this.seen = mine;
    this.mark(mine.runs);
    this.#tell();
  }

  #status(text, isError = false) {
    if ($("try-status").textContent !== text) $("try-status").textContent = text;
    $("try-status").classList.toggle("error", isError);
  }

  // Shows the state of the running answer.
  #tell() {
    const { running: answer, seen: one } = this;
    if (!answer) return;
    const parts = [one ? phaseWords(one) : answer.events ? "decoding" : "waiting for the first token"];
    if (answer.events) parts.push(`${number(answer.events)} tokens${answer.speed === null ? "" : `, ${number(answer.speed)} tokens/s`}`);
    if (one?.blocks) parts.push(`in ${number(one.blocks)} ${this.block}s: ${one.hidden_runs ? "… " : ""}${runs(one.runs)}`);
    this.#status(parts.join(" · "));
  }

  #clear() {
    this.running?.stop();
    this.messages = [];
    $("turns").replaceChildren();
    $("turns-hint").hidden = false;
    this.#status("");
    $("message").focus();
  }

  async #send() {
    if (this.running) return;
    const isChat = this.mode === "chat";
    const input = $(isChat ? "message" : "prompt");
    const text = input.value;
    if (!text.trim()) { this.#status(isChat ? "Type a message first." : "Type a prompt first.", true); input.focus(); return; }
    let body;
    try { body = parameters(); } catch (error) { this.#status(error.message, true); return; }
    const system = $("p-system").value;
    const asked = { role: "user", content: text };
    if (isChat) body.messages = [...(system.trim() ? [{ role: "system", content: system }] : []), ...this.messages, asked];
    else body.prompt = text;
    const view = isChat ? this.#turn(text) : this.#completion(text);
    if (isChat) input.value = "";
    const answer = this.running = new Answer(isChat ? "/v1/chat/completions" : "/v1/completions", body, () => {
      this.#follow(view, () => { view.text.textContent = answer.text; view.thoughts.textContent = answer.thoughts; });
      this.#tell();
    });
    this.seen = null;
    $("send").disabled = $("tab-chat").disabled = $("tab-completion").disabled = true;
    $("stop").disabled = false;
    this.#tell();
    view.box.scrollTop = view.box.scrollHeight;
    view.box.scrollIntoView({ block: "nearest" });
    let failure = null;
    try { await answer.read(); } catch (error) { failure = error; }
    this.#end(view, answer, failure, { isChat, asked, input });
  }

  #end(view, answer, failure, { isChat, asked, input }) {
    this.running = null;
    $("send").disabled = $("tab-chat").disabled = $("tab-completion").disabled = false;
    if (document.activeElement === $("stop")) $("send").focus();
    $("stop").disabled = true;
    const isKept = answer.text !== "" || answer.thoughts !== "" || failure === null;
    const end = failure ? "broken off" : answer.isStopped ? "stopped" : endWords(answer.reason, answer.stopReason, answer.count, answer.body.max_tokens);
    this.#follow(view, () => {
      view.turn.classList.remove("growing");
      if (isKept) view.meta.replaceChildren(...this.#bar(answer), `${answerWords(answer)} · ${end}`);
      else view.remove();
    });
    if (isChat && isKept && view.turn.isConnected) {
      const said = { role: "assistant", content: answer.text };
      this.messages.push(asked, answer.thoughts ? { ...said, reasoning_content: answer.thoughts } : said);
    } else if (isChat && !isKept && input.value === "") input.value = asked.content;
    $("turns-hint").hidden = $("turns").children.length > 0;
    if (failure) this.#status(errorWords(failure), true);
    else if (answer.isStopped) this.#status("stopped");
    else {
      const { seen } = this;
      this.#status(seen?.blocks ? `last seen in ${number(seen.blocks)} ${this.block}s: ${seen.hidden_runs ? "… " : ""}${runs(seen.runs)}` : "");
      announce(`The answer is complete: ${end}.`);
    }
  }

  // The cached share of the prompt, as a bar.
  #bar(answer) {
    if (!answer.usage) return [];
    const { prompt_tokens: all, prompt_tokens_details: { cached_tokens: cached } = { cached_tokens: 0 } } = answer.usage;
    const share = make("i");
    share.style.width = percent(cached / Math.max(1, all)).replace(" ", "");
    return [make("span", { className: "share", "aria-hidden": "true" }, share)];
  }

  // Changes a view; a view that was scrolled to its end stays there.
  #follow(view, change) {
    const follows = isAtEnd(view.box);
    change();
    if (follows) view.box.scrollTop = view.box.scrollHeight;
  }

  // The views of an answer's parts.
  #turn(text) {
    const parts = { thoughts: make("div", { className: "thoughts" }), text: make("div", { className: "text" }), meta: make("p", { className: "meta" }) };
    const mine = make("li", { className: "turn user" }, make("h3", {}, "You"), make("div", { className: "text" }, text));
    const turn = make("li", { className: "turn growing" }, make("h3", {}, "Model"), parts.thoughts, parts.text, parts.meta);
    $("turns-hint").hidden = true;
    $("turns").append(mine, turn);
    return { ...parts, turn, box: $("chat-output"), remove: () => { mine.remove(); turn.remove(); } };
  }

  #completion(text) {
    const parts = { text: make("span", { className: "text" }), thoughts: make("span"), meta: $("completion-meta") };
    const turn = $("answer");
    $("answer-hint").hidden = true;
    turn.replaceChildren(make("span", { className: "given" }, text), parts.text);
    turn.classList.add("growing");
    parts.meta.replaceChildren();
    return { ...parts, turn, box: $("completion-output"), remove: () => { turn.replaceChildren(); $("answer-hint").hidden = false; } };
  }
}
