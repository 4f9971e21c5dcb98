// Work that is done now and again, as long as somebody looks: a hidden tab asks for nothing.

/** Runs `work` at once and then `periodMs` after each end, while the tab is visible. Returns a
 * function that runs it now. */
export function whileVisible(work, periodMs) {
  let timer = null;
  let isRunning = false;

  async function turn() {
    clearTimeout(timer);
    if (isRunning || document.visibilityState !== "visible") return;
    isRunning = true;
    try {
      await work();
    } finally {
      isRunning = false;
      timer = setTimeout(turn, periodMs);
    }
  }

  document.addEventListener("visibilitychange", turn);
  turn();
  return turn;
}
