/** Who uses the page, and what they may do. */
import { batch, computed, signal } from "@preact/signals";
import { call, csrf, Problem, type Schema } from "../api/client";
import { rememberHospital } from "./remembered";
import { restart } from "./router";
import { retry, work } from "./unsaved";

type SessionView = Schema<"SessionView">;
export type Role = "reader" | "operator" | "approver" | "admin" | "federation";

export const session = signal<SessionView | null>(null);
/**
 * `starting` until the service has answered who this is; `unknown` where it could not. `ended`: the session is over, and
 * the view waits for the same person.
 */
export const state = signal<"starting" | "signed-out" | "signed-in" | "ended" | "unknown">("starting");
/** How often a person came back to a view without unsaved work, which is then read again. */
export const returns = signal(0);
/** Why the person could not sign in or out. */
export const refusal = signal<unknown>(null);

/** What each role includes: a role of people includes the ones before it. */
const LADDER: Role[] = ["reader", "operator", "approver", "admin"];

export function has(needed: Role): boolean {
  const roles = session.value?.roles ?? [];
  const least = LADDER.indexOf(needed);
  return roles.some((role) => role === needed || (least >= 0 && LADDER.indexOf(role as Role) >= least));
}

export const actor = computed(() => session.value?.actor ?? "");

function begin(found: SessionView): void {
  const isReturn = state.peek() === "ended";
  if (isReturn && found.actor !== actor.peek()) {
    // Neither may another person see what is open, nor be named as its author.
    work.peek()?.drop();
    rememberHospital("");
    restart();
    return;
  }
  batch(() => {
    session.value = found;
    csrf.value = found.csrf ?? null;
    refusal.value = null;
    state.value = "signed-in";
    if (isReturn) readAgain();
  });
  if (isReturn) void retry();
}

/** Read the view again, unless that would lose what a person draws or writes. */
function readAgain(): void {
  const writes = document.querySelector("dialog[open]:not(.cover)") !== null;
  if (!writes && (work.peek()?.isSafe.peek() ?? true)) returns.value += 1;
}

/** Take up the work where the service answers again. */
export function goOn(): void {
  if (state.peek() === "unknown") void resume();
  if (state.peek() !== "signed-in") return;
  readAgain();
  void retry();
}

/** Take up the session of the cookie, if there is one. */
export async function resume(): Promise<void> {
  try {
    begin((await call("get", "/session")).data);
  } catch (error) {
    const status = error instanceof Problem ? error.status : 0;
    refusal.value = status === 401 ? null : error;
    // A caller without a role can sign in with another key.
    state.value = status === 401 || status === 403 ? "signed-out" : "unknown";
  }
}

/** Exchange a key, or an access token, for a session. The page does not keep it. */
export async function signIn(credential: string): Promise<void> {
  try {
    // No header carries other characters: the browser would not send them.
    if (!/^[!-~]+$/.test(credential)) {
      throw new Error("Expected ASCII letters, digits and signs, found another character. Copy the key again.");
    }
    const headers = { Authorization: `Bearer ${credential}` };
    begin((await call("post", "/session", { headers })).data);
  } catch (error) {
    refusal.value = error;
  }
}

export async function signOut(): Promise<void> {
  refusal.value = null;
  try {
    await call("delete", "/session");
  } catch (error) {
    if (!(error instanceof Problem) || error.status !== 401) {
      refusal.value = error;
      return;
    }
  }
  // Nothing of it is left for the next person.
  rememberHospital("");
  restart();
}

/** Sign in again where the session ended while the page was open. */
window.addEventListener("locum:unauthenticated", () => {
  if (state.peek() !== "signed-in") return;
  refusal.value = new Problem(401, "", "The session has ended", "Sign in again.", {});
  state.value = "ended";
});
