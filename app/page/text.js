// An answer's text as elements: code blocks, inline code and bold. Never as HTML: every character of
// it goes through textContent.

const FENCE = /^ {0,3}```/;
const INLINE = /(`[^`\n]+`|\*\*[^*\n]+\*\*)/;

/** Puts `text` into `target`, instead of what was there. */
export function show(target, text) {
  target.replaceChildren(...blocks(text));
}

function* blocks(text) {
  let lines = [];
  let isCode = false;
  const taken = () => {
    const joined = lines.join("\n");
    lines = [];
    return joined;
  };
  for (const line of text.split("\n")) {
    if (!FENCE.test(line)) {
      lines.push(line);
      continue;
    }
    yield* isCode ? [code(taken())] : prose(taken());
    isCode = !isCode;
  }
  yield* isCode ? [code(taken())] : prose(taken());
}

function* prose(text) {
  const trimmed = text.replace(/^\n+|\s+$/g, "");
  if (!trimmed) return;
  const paragraph = document.createElement("p");
  for (const part of trimmed.split(INLINE)) {
    if (INLINE.test(part)) paragraph.append(marked(part));
    else paragraph.append(document.createTextNode(part));
  }
  yield paragraph;
}

function marked(part) {
  const isCode = part.startsWith("`");
  const element = document.createElement(isCode ? "code" : "strong");
  element.textContent = isCode ? part.slice(1, -1) : part.slice(2, -2);
  return element;
}

function code(text) {
  const block = document.createElement("pre");
  const inner = document.createElement("code");
  inner.textContent = text;
  block.tabIndex = 0; // it may scroll sideways, by keys too
  block.append(inner);
  return block;
}
