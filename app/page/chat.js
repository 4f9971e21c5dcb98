// The conversation: what has been said, and one answer at a time. A turn counts for the next ones
// once its answer has text; one that fails can be tried again.

import { Refused, ask } from "./ask.js";
import { askForKey } from "./key.js";
import { AnswerView, facts, question } from "./message.js";
import { parameters, systemMessages } from "./parameters.js";
import { forget, server } from "./server.js";

const list = document.getElementById("messages");
const scroll = document.getElementById("scroll");
const told = document.getElementById("told"); // to those who do not see the page

let turns = []; // messages, as the server takes them
let running = null; // the AbortController of the answer that comes

export const chat = { onState: () => {} }; // hears whether an answer is coming

export function isAnswering() {
  return running !== null;
}

export function stop() {
  running?.abort();
}

export function clear() {
  stop();
  turns = [];
  running = null; // what still comes of it goes to nobody
  list.replaceChildren();
  chat.onState(false);
}

/** Asks `text`, and shows what comes of it. */
export async function say(text) {
  await answer(text, [question(list, text)]);
}

async function answer(text, shown) {
  const view = new AnswerView(list, server.name ?? "Model");
  const mine = (running = new AbortController());
  chat.onState(true);
  told.textContent = "Answering";
  toEnd();
  try {
    await follow(view, text, mine.signal);
  } catch (error) {
    if (running === mine) fail(view, error, () => again(text, shown, view));
  } finally {
    if (running === mine) {
      running = null;
      chat.onState(false);
    }
  }
}

function again(text, shown, view) {
  if (isAnswering()) return;
  view.item.remove();
  list.append(...shown);
  answer(text, shown);
}

async function follow(view, text, signal) {
  const sentAt = performance.now();
  const seen = { firstMs: null, lastMs: null, reason: null, usage: null, timings: null };
  try {
    for await (const event of parts(text, signal)) {
      for (const name of ["reason", "usage", "timings"]) seen[name] = event[name] ?? seen[name];
      if (!event.text) continue;
      seen.lastMs = performance.now() - sentAt;
      if (seen.firstMs === null) {
        seen.firstMs = seen.lastMs;
        view.note(facts(seen).join(" · "));
      }
      const follows = isAtEnd();
      view.add(event.text, () => follows && toEnd());
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    seen.isStopped = true;
  }
  const follows = isAtEnd();
  view.end(facts(seen));
  if (follows) toEnd();
  if (view.text && running?.signal === signal) {
    turns.push({ role: "user", content: text }, { role: "assistant", content: view.text });
  }
  told.textContent = seen.isStopped ? "Stopped" : `Answered: ${view.text}`;
}

/** The answer's events; asks for a key, and asks without a conversation, where the server wants. */
async function* parts(text, signal) {
  for (;;) {
    const { path, body } = wanted(text);
    try {
      yield* ask(path, body, signal);
      return;
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      const hasNoTemplate = error.param === "messages" && /no chat template/.test(error.message);
      if (hasNoTemplate && server.takesChats) {
        server.takesChats = false;
        server.onChange();
      } else if (error.status !== 401 || !(await askForKey(error.message))) {
        throw error;
      } else {
        forget();
      }
      signal.throwIfAborted();
    }
  }
}

function wanted(text) {
  const body = { ...parameters(), stream: true };
  if (!server.takesChats) return { path: "generate", body: { prompt: text, ...body } };
  const messages = [...(server.takesSystem ? systemMessages() : []), ...turns];
  messages.push({ role: "user", content: text });
  const options = { stream_options: { include_usage: true } };
  return { path: "v1/chat/completions", body: { messages, ...body, ...options } };
}

function fail(view, error, onRetry) {
  if (!(error instanceof Refused)) console.info(error); // a wrong field, or an error of this page
  told.textContent = "";
  view.fail(error.message, onRetry);
  toEnd();
}

function isAtEnd() {
  return scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
}

function toEnd() {
  scroll.scrollTop = scroll.scrollHeight;
}
