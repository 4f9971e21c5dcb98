// What the person has set beside the question. Empty fields are not sent: the server's defaults hold.

const form = document.getElementById("fields");
const INTEGERS = new Set(["max_tokens", "seed"]);

/** The fields of a request's body. Throws an Error that names what cannot be read. */
export function parameters() {
  const body = {};
  for (const input of form.querySelectorAll("input")) {
    if (input.validity.badInput) throw new Error(`${input.name}: this is not a number.`);
    if (input.value === "") continue;
    body[input.name] = input.type === "number" ? number(input) : input.value;
  }
  return body;
}

/** As messages that come first: one, or none. */
export function systemMessages() {
  const content = form.elements.system.value.trim();
  return content ? [{ role: "system", content }] : [];
}

function number(input) {
  const value = Number(input.value);
  if (INTEGERS.has(input.name) && !Number.isSafeInteger(value)) {
    throw new Error(`${input.name}: this must be an integer that JavaScript can hold.`);
  }
  return value;
}
