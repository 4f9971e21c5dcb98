// The page put together: buttons and keys on one side, the conversation and the server on the other.

import { chat, clear, isAnswering, say, stop } from "./chat.js";
import { askForKey } from "./key.js";
import { forget, server } from "./server.js";

const byId = (id) => document.getElementById(id);
const box = byId("text");
const narrow = matchMedia("(max-width: 60rem)");

function send() {
  const text = box.value.trim();
  if (!text || isAnswering()) return;
  box.value = "";
  grow();
  byId("welcome").hidden = true;
  say(text);
}

function grow() {
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`; // and its border
}

chat.onState = (isComing) => {
  const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
  byId("send").hidden = isComing;
  byId("stop").hidden = !isComing;
  if (hadFocus) box.focus(); // else it would be nowhere
};

server.onChange = () => {
  document.title = `${server.name} · phi-serve`;
  byId("system-field").hidden = !server.takesSystem;
  box.placeholder = server.takesChats ? `Ask ${server.name}` : "A text to continue";
  byId("examples").hidden = !server.takesChats;
  if (!server.takesChats) {
    byId("welcome").querySelector("h2").textContent = "Write the beginning of a text.";
    byId("welcome-note").textContent =
      "This model has no chat template: it continues each text, and remembers nothing of the last.";
  }
};

function startNew() {
  clear();
  byId("welcome").hidden = false;
  box.focus();
}

async function changeKey() {
  await askForKey();
  forget();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("fields").addEventListener("submit", (event) => event.preventDefault());
box.addEventListener("input", grow);
window.addEventListener("resize", grow);
box.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !byId("key-dialog").open) stop();
});
byId("stop").addEventListener("click", stop);
byId("new-chat").addEventListener("click", startNew);
byId("key-button").addEventListener("click", changeKey);
for (const example of byId("examples").querySelectorAll("button")) {
  example.addEventListener("click", () => {
    box.value = example.textContent;
    send();
  });
}

function fold() {
  for (const id of ["live", "parameters"]) byId(id).open = !narrow.matches;
}
narrow.addEventListener("change", fold);
fold();
