/** A service that does not answer: the page says so once, over every view, asks again, and goes on when it is back. */
import { signal } from "@preact/signals";
import { call, isUnreachable } from "../api/client";
import { goOn } from "./session";

const FIRST_MS = 1000;
const MOST_MS = 10_000;

export const isAway = signal(false);
let timer: ReturnType<typeof setTimeout> | undefined;
let isAsking = false;

/** Ask the service for the session, which every caller may, now and again until it answers. */
export async function ask(pause = FIRST_MS): Promise<void> {
  if (isAsking) return;
  clearTimeout(timer);
  isAsking = true;
  const answers = await call("get", "/session").then(
    () => true,
    (error: unknown) => !isUnreachable(error),
  );
  isAsking = false;
  if (!answers) {
    isAway.value = true;
    timer = setTimeout(() => void ask(Math.min(2 * pause, MOST_MS)), pause);
  } else if (isAway.peek()) {
    isAway.value = false;
    goOn();
  }
}

// One request may fail where the next does not: the service is asked before the page says that it is away.
window.addEventListener("locum:unreachable", () => {
  if (!isAway.peek()) void ask();
});
window.addEventListener("offline", () => void ask());
window.addEventListener("online", () => void ask());

export function Away() {
  return (
    <div role="status">
      {isAway.value && (
        <div class="away">
          <span class="away-mark" aria-hidden="true" />
          <strong>The service does not answer.</strong>
          <span class="grow">What is shown may be old. The page asks again every few seconds, and goes on by itself.</span>
          <button type="button" class="button small" onClick={() => void ask()}>
            Ask now
          </button>
        </div>
      )}
    </div>
  );
}
