/** Who uses the page, and what they may do. */
import { computed, signal } from "@preact/signals";
import { call, csrf, Problem, type Schema } from "../api/client";

type SessionView = Schema<"SessionView">;
export type Role = "reader" | "operator" | "approver" | "admin" | "federation";

export const session = signal<SessionView | null>(null);
/** `starting` until the service has answered who this is; `unknown` where it could not. */
export const state = signal<"starting" | "signed-out" | "signed-in" | "unknown">("starting");
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
  session.value = found;
  csrf.value = found.csrf ?? null;
  refusal.value = null;
  state.value = "signed-in";
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
    // A session that had ended is reported below.
    if (state.peek() === "signed-in") refusal.value = error;
    return;
  }
  session.value = null;
  csrf.value = null;
  state.value = "signed-out";
}

/** Sign in again where the session ended while the page was open. */
window.addEventListener("locum:unauthenticated", () => {
  if (state.peek() !== "signed-in") return;
  refusal.value = new Problem(401, "", "The session has ended", "Sign in again.", {});
  session.value = null;
  state.value = "signed-out";
});
