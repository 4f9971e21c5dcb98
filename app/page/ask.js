// One question to the server, and its answer as it comes. Knows HTTP, and nothing of the page.

import { keyHeaders } from "./key.js";

/** What went wrong, in the server's words. `status` is 0 where there was no answer at all. */
export class Refused extends Error {
  constructor(message, status = 0, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** Yields {text}, and of the last events {reason}, {usage} and {timings}. Throws Refused, and
 * AbortError once `signal` is. To abort closes the connection, and the server frees the row. */
export async function* ask(path, body, signal) {
  const response = await send(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", ...keyHeaders() },
    body: JSON.stringify(body),
    signal,
  });
  let isWhole = false;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") continue;
    const told = JSON.parse(data);
    if (told.error) throw new Refused(told.error.message, response.status);
    const found = path === "generate" ? told : { ...told, ...chosen(told) };
    isWhole ||= Boolean(found.finish_reason);
    yield {
      text: found.text ?? "",
      reason: found.finish_reason ?? null,
      usage: found.usage ?? null,
      timings: found.timings ?? null,
    };
  }
  if (!isWhole) throw new Refused("The connection ended before the answer did.");
}

/** JSON of a GET. Throws Refused. */
export async function get(path) {
  return (await send(path, { headers: keyHeaders() })).json();
}

/** A GET's text, without the key. Throws Refused. */
export async function getText(path) {
  return (await send(path, {})).text();
}

async function send(path, options) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", credentials: "omit", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server cannot be reached.");
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  const message = told?.error?.message ?? `The server answered ${response.status}.`;
  const wait = response.headers.get("Retry-After");
  const hint = wait ? ` (try again in ${wait} s)` : "";
  throw new Refused(message + hint, response.status, told?.error?.param);
}

function chosen(chunk) {
  const choice = chunk.choices?.[0];
  return { text: choice?.delta?.content, finish_reason: choice?.finish_reason };
}

/** What each server-sent event says; comments are left out. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The connection broke off.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
