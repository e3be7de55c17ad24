/** Who uses the page, and what they may do. */
import { computed, signal } from "@preact/signals";
import { call, csrf, Problem, type Schema } from "../api/client";

type SessionView = Schema<"SessionView">;
export type Role = "reader" | "operator" | "approver" | "admin" | "federation";

export const session = signal<SessionView | null>(null);
/** `starting` until the service has answered who this is. */
export const state = signal<"starting" | "signed-out" | "signed-in" | "unreachable">("starting");
export const refusal = signal<string | null>(null);

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
    leave(error);
  }
}

/** Exchange a key, or an access token, for a session. The page does not keep it. */
export async function signIn(credential: string): Promise<void> {
  try {
    const headers = { Authorization: `Bearer ${credential}` };
    begin((await call("post", "/session", { headers })).data);
  } catch (error) {
    leave(error);
    if (error instanceof Problem) refusal.value = error.detail;
  }
}

export async function signOut(): Promise<void> {
  await call("delete", "/session");
  session.value = null;
  csrf.value = null;
  state.value = "signed-out";
}

function leave(error: unknown): void {
  session.value = null;
  state.value = error instanceof Problem && error.status === 401 ? "signed-out" : "unreachable";
}

/** Sign in again where the session ended while the page was open. */
window.addEventListener("locum:unauthenticated", () => {
  if (state.peek() !== "signed-in") return;
  refusal.value = "The session has ended: sign in again.";
  session.value = null;
  state.value = "signed-out";
});
