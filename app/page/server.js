// What is known of the server: which model it serves, and whether it takes conversations.

import { Refused, get, getText } from "./ask.js";
import { PERIOD_MS, refresh } from "./tiles.js";
import { whileVisible } from "./poll.js";

const dot = document.getElementById("dot");
const label = document.getElementById("model");
let known = null; // the name that /info was read for
let lacksKey = false;

export const server = { name: null, takesChats: true, takesSystem: true, onChange: () => {} };

/** Asks now. */
export const look = whileVisible(turn, PERIOD_MS);

/** /info is read again, with the key that there is now. */
export function forget() {
  known = null;
  lacksKey = false;
  return look();
}

async function turn() {
  const told = await refresh();
  if (!told.isReachable) {
    tell("bad", "cannot be reached");
  } else if (told.values?.get("ready") === 0) {
    tell("busy", await whyNotReady());
  } else {
    await know(told.model?.model ?? null);
  }
}

/** Reads /info, if what is served may be another model than the one that is known. */
async function know(name) {
  if (known !== null && (name === null || name === known)) {
    tell("ready", server.name);
    return;
  }
  if (lacksKey) return;
  try {
    learn(await get("info"), name);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    lacksKey = error.status === 401;
    const isWaiting = lacksKey || error.status === 503;
    tell(isWaiting ? "busy" : "bad", lacksKey ? "needs an API key" : error.message);
  }
}

/** Of /health/ready, whose 503 is no refused request. */
async function whyNotReady() {
  try {
    await getText("health/ready");
    return server.name ?? "nearly ready";
  } catch (error) {
    return error.message;
  }
}

function learn(info, name) {
  known = name ?? info.model ?? "";
  server.name = info.model ?? name ?? "a model";
  const roles = info.chat_roles;
  server.takesChats = !Array.isArray(roles) || roles.length > 0;
  server.takesSystem = server.takesChats && (roles?.includes("system") ?? true);
  tell("ready", server.name);
  server.onChange();
}

function tell(state, text) {
  dot.dataset.state = state;
  if (label.textContent !== text) label.textContent = text;
  label.title = text;
}
