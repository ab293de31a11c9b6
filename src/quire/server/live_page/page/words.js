// The words for states, phases, reasons and errors: sentences for the server's codes.

import { number, seconds } from "./format.js";

// Of blocks: the name, and its meaning in the legend.
export const BLOCK_STATES = {
  free: ["free", "empty"],
  cached: ["cached", "not in use, kept for a later request"],
  held: ["held", "in use by a request"],
  in_flight: ["in flight", "released, but a step still reads it"],
  pinned: ["pinned", "kept by a pin"],
};

// Of sequences (scheduler/phase.py): the words in a row, their meaning in the legend, and the kind, which has a colour.
export const PHASES = {
  prefill: ["prefill", "its prompt is being computed", "prefill"],
  decode: ["decoding", "each step gives it a token", "decode"],
  loading: ["loading from a tier", "the beginning of its prompt comes from host memory, disk or another machine", "wait"],
  searching: ["looking in the tiers", "the tiers look up its prompt", "wait"],
  prefix: ["waiting for a shared beginning", "another request computes the tokens that both begin with", "wait"],
  memory: ["waiting for memory", "it, or one before it, does not fit into the free blocks", "wait"],
  quota: ["waiting for its quota", "its tenant has all the blocks of its quota", "wait"],
  seat: ["waiting for a place in the batch", "as many sequences run as may run at once", "wait"],
  turn: ["next in line", "the step had no room for its tokens", "wait"],
  paused: ["paused", "its client has not read the output so far", "wait"],
};
export const PREEMPTED = ["preempted, its tokens kept", "its blocks were given to others; it continues from its tokens, "
  + "with what is cached of them, or with a copy in host memory"];

export function phaseWords(one) {
  const [name] = PHASES[one.phase] ?? [one.phase];
  if (one.preempted)
    return `${PREEMPTED[0]}${one.swapped ? " in host memory" : ""}${one.phase === "turn" ? "" : `; ${name}`}`;
  return one.phase === "prefill" ? `${name}, ${number(one.computed)} of ${number(one.tokens)} tokens` : name;
}

export const phaseKind = (one) => (PHASES[one.phase] ?? [])[2] ?? "wait";

// Why blocks left memory (cache/event_dispatcher.py): short, for totals.
export const LOSSES = {
  space: "the pool was full",
  quota: "a tenant was at its quota",
  idle: "the system was short of memory",
  dropped: "a request dropped it",
  resize: "the cache got less memory",
};

const ORDER = {
  discard: "content marked to go first went",
  normal: "the least recently used went",
  keep: "only content marked to stay was left",
};

export function lossWords(row) {
  const limit = row.limit === null ? "" : ` of ${number(row.limit)} blocks`;
  const why = {
    space: `the pool${limit} was full`,
    quota: `${row.tenant} was at its quota${limit}`,
    idle: "the system was short of memory while no request ran",
    dropped: "a request dropped it (drop, flush or trim)",
    resize: LOSSES.resize,
  }[row.reason] ?? row.reason;
  return row.reason === "dropped" ? why : `${why}; ${ORDER[row.cache_priority]}`;
}

// Why no more of a prompt was found (engine/prompt_explanation.py): a clause behind "because".
export const MISSES = {
  complete: "nothing was missing: the last token is always computed",
  "no state": "no state of the model was stored at the end of the cached tokens",
  expired: "its pin had expired, and it was evicted",
  evicted: "memory had evicted the rest",
  forgotten: "the rest had been dropped",
  "other namespace": "the rest is cached under another salt",
  "other fingerprint": "the rest is cached for another model, format or build",
  differs: "the cached prompt differs from here on",
  longer: "the cached block is longer than the prompt",
  "never seen": "the rest was never computed before",
};

// Of a turn, as a sentence; with the texts around a difference.
export function missWords(turn) {
  if (turn.cause === null) return "The reason is not known.";
  const words = MISSES[turn.cause] ?? turn.cause, where = turn.where_it_differs;
  const sentence = `${words[0].toUpperCase()}${words.slice(1)}`;
  if (!where || where.asked === undefined) return `${sentence}.`;
  return `${sentence}: behind ${JSON.stringify(where.before)} came ${JSON.stringify(where.asked)} in place of ${JSON.stringify(where.stored)}.`;
}

// How an answer ended. asked: the requested number of tokens.
export function endWords(reason, stopReason, count, asked) {
  if (reason === "stop" && typeof stopReason === "string") return `ended at the stop string ${JSON.stringify(stopReason)}`;
  if (reason === "stop" && typeof stopReason === "number") return `ended at the stop token ${stopReason}`;
  if (reason === "stop") return "ended by the model";
  if (reason === "length") return count >= asked ? `ended at ${number(asked)} tokens, the requested number` : "ended at the longest possible sequence";
  if (reason === "tool_calls") return "ended with a call of a tool";
  return reason ? `ended: ${reason}` : "broken off";
}

export function answerWords({ usage, count, speed, firstS }) {
  const parts = [];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(`${number(cached)} of ${number(usage.prompt_tokens)} prompt tokens from the cache`);
  }
  parts.push(`${number(count)} ${count === 1 ? "token" : "tokens"} generated${speed === null ? "" : `, ${number(speed)} tokens/s`}`);
  if (firstS !== null) parts.push(`first token after ${seconds(firstS)}`);
  return parts.join(" · ");
}

const REFUSALS = {
  400: "The request was refused",
  401: "The server wants an API key; press Key … and type one",
  403: "This key may not do that",
  404: "There is no such object",
  408: "The request took too long to arrive",
  413: "The request is too large",
  429: "The server has too much to do",
  500: "The server failed",
  503: "The server takes no requests now",
};
const TYPES = { authentication_error: 401, permission_error: 403, rate_limit_error: 429, service_unavailable: 503, internal_error: 500 };

// Any error of a request: what happened, and the server's message.
export function errorWords(error) {
  if (error.name === "AbortError") return "stopped";
  if (error.status === undefined && error.type === undefined)
    return error instanceof TypeError ? "There is no connection to the server; is it still running?" : error.message;
  const what = REFUSALS[error.status ?? TYPES[error.type] ?? 400] ?? `The server answered with status ${error.status}`;
  const again = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  return `${what}: ${error.message}${/[.!?]$/.test(error.message) ? "" : "."}${again}`;
}
