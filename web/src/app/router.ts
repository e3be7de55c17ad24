/** The address's fragment names the view and what it shows: `#/look?model=brain`. */
import { computed, signal } from "@preact/signals";
import { leave } from "./unsaved";

export interface Place {
  view: string;
  parameters: URLSearchParams;
}

const fragment = signal(location.hash);
window.addEventListener("hashchange", () => {
  const next = location.hash;
  if (next === fragment.peek()) return;
  // The view stays until its work is saved, and so does its address.
  history.replaceState(null, "", fragment.peek());
  void leave(() => show(next));
});

export const place = computed<Place>(() => {
  const [path = "", query = ""] = fragment.value.replace(/^#\/?/, "").split("?", 2);
  return { view: path || "look", parameters: new URLSearchParams(query) };
});

/** The address of a view; parameters that are empty are left out. */
export function address(view: string, parameters: Record<string, string | null | undefined> = {}): string {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) if (value) query.set(name, value);
  const text = query.toString();
  return `#/${view}${text ? `?${text}` : ""}`;
}

/** Change what the present view shows, without an entry in the browser's history. */
export function keepInAddress(parameters: Record<string, string | null | undefined>): void {
  const found = Object.fromEntries(place.peek().parameters);
  show(address(place.peek().view, { ...found, ...parameters }));
}

/** Forget the address of what was shown, and read the page again. */
export function restart(): void {
  history.replaceState(null, "", location.pathname + location.search);
  location.reload();
}

function show(next: string): void {
  if (next !== location.hash) history.replaceState(null, "", next);
  fragment.value = next;
}
