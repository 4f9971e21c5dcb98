// One message of the conversation, as it is seen.

import { show } from "./text.js";

const REASONS = {
  length: "hit the token limit",
  timeout: "out of time",
  repetition: "went in circles",
};

/** A person's message. */
export function question(list, text) {
  const { item, body } = entry(list, "you", "You");
  const paragraph = document.createElement("p");
  paragraph.textContent = text;
  body.append(paragraph);
  return item;
}

/** An answer that grows. Drawn once a frame at most, however fast it comes. */
export class AnswerView {
  constructor(list, name) {
    this.text = "";
    this.frame = null;
    const { item, body } = entry(list, "answer", name);
    this.item = item;
    this.body = body;
    this.foot = document.createElement("p");
    this.foot.className = "foot";
    item.append(this.foot);
    item.setAttribute("aria-busy", "true");
    this.note("waiting for the first token");
  }

  add(text, onDrawn) {
    this.text += text;
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
      onDrawn();
    });
  }

  draw() {
    if (this.frame !== null) cancelAnimationFrame(this.frame);
    this.frame = null;
    show(this.body, this.text);
  }

  note(text) {
    this.foot.textContent = text;
  }

  /** `facts` in words, behind the last of it. */
  end(facts) {
    this.draw();
    this.item.removeAttribute("aria-busy");
    this.note(facts.join(" · "));
  }

  fail(message, onRetry) {
    this.end([]);
    this.item.classList.add("failed");
    const problem = document.createElement("p");
    problem.className = "error";
    problem.setAttribute("role", "alert");
    const retry = document.createElement("button");
    retry.type = "button";
    retry.className = "quiet";
    retry.textContent = "Try again";
    retry.addEventListener("click", onRetry);
    this.item.append(problem, retry);
    problem.textContent = message; // behind its place: what is put into an alert is read out
  }
}

/** What is told of an answer: times are as this page saw them, the rate is the server's. */
export function facts({ firstMs, lastMs, reason, usage, timings, isStopped }) {
  const told = [];
  if (firstMs !== null) told.push(`first token ${Math.round(firstMs)} ms`);
  const rate = timings?.tokens_per_second ?? measured(usage, firstMs, lastMs);
  if (rate) told.push(`${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`);
  if (usage) told.push(plural(usage.completion_tokens, "token"));
  if (isStopped) told.push("stopped");
  if (REASONS[reason]) told.push(REASONS[reason]);
  return told;
}

function measured(usage, firstMs, lastMs) {
  const num = (usage?.completion_tokens ?? 0) - 1;
  return num > 0 && lastMs > firstMs ? (1000 * num) / (lastMs - firstMs) : null;
}

function plural(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

function entry(list, kind, name) {
  const item = document.createElement("li");
  const who = document.createElement("p");
  const body = document.createElement("div");
  item.className = `message ${kind}`;
  who.className = "who";
  who.textContent = name;
  body.className = "body";
  item.append(who, body);
  list.append(item);
  return { item, body };
}
