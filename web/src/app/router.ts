/** The address's fragment names the view and what it shows: `#/look?model=brain`. */
import { computed, signal } from "@preact/signals";

export interface Place {
  view: string;
  parameters: URLSearchParams;
}

const fragment = signal(location.hash);
window.addEventListener("hashchange", () => (fragment.value = location.hash));

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
  const next = address(place.peek().view, { ...found, ...parameters });
  if (next === location.hash) return;
  history.replaceState(null, "", next);
  fragment.value = next;
}
