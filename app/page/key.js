// The API key: kept for this tab only (sessionStorage), asked for when the server wants one.

const STORED = "phi-serve-key";
const VISIBLE_ASCII = /^[\x21-\x7e]{1,512}$/; // what the header can carry, and the server takes

const byId = (id) => document.getElementById(id);
const dialog = byId("key-dialog");
let answer = null; // of the question that is open: whoever asked hears true for a new key

export function keyHeaders() {
  const key = sessionStorage.getItem(STORED);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Opens the dialog; resolves to whether a key was given. `why` is what the server said. */
export function askForKey(why = "") {
  answer?.(false);
  byId("key").value = "";
  say(why);
  byId("key-forget").hidden = sessionStorage.getItem(STORED) === null;
  if (!dialog.open) dialog.showModal();
  byId("key").focus();
  return new Promise((resolve) => (answer = resolve));
}

function close(isGiven) {
  const told = answer;
  answer = null;
  if (dialog.open) dialog.close();
  told?.(isGiven);
}

function say(problem) {
  byId("key-error").textContent = problem;
  byId("key-error").hidden = !problem;
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  if (!VISIBLE_ASCII.test(key)) {
    say("A key is 1 to 512 visible ASCII characters.");
    return;
  }
  sessionStorage.setItem(STORED, key);
  close(true);
});
byId("key-forget").addEventListener("click", () => {
  sessionStorage.removeItem(STORED);
  close(false);
});
byId("key-cancel").addEventListener("click", () => close(false));
dialog.addEventListener("close", () => close(false)); // Esc
