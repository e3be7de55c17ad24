/** Models and hospitals, which every view lists. */
import { signal } from "@preact/signals";
import { call, pagesOf, type Schema } from "../api/client";
import { rememberedHospital } from "./remembered";
import { place } from "./router";
import { has } from "./session";

export type Model = Schema<"ModelSummary">;
export type Hospital = Schema<"HospitalView">;

/** The federation's models, and those adapted to a hospital: all, or those of the hospitals that were chosen if there are many. */
export const models = signal<Model[]>([]);
export const hospitals = signal<Hospital[]>([]);
/** Whether `models` has every model that was adapted to a hospital. */
export const modelsAreWhole = signal(true);
/** Versions of the store that cannot be read, and why. */
export const unreadable = signal<Schema<"UnreadableModel">[]>([]);
export const catalogueError = signal<unknown>(null);
export const catalogueLoaded = signal(false);

export async function loadCatalogue(): Promise<void> {
  try {
    const [first, registered] = await Promise.all([
      call("get", "/models"),
      // A federation's operator sees no hospital.
      has("reader") ? pagesOf((cursor) => call("get", "/hospitals", { query: cursor })) : [],
    ]);
    const isWhole = first.data.next === null;
    const pages = isWhole
      ? [first.data]
      : await pagesOf((cursor) => call("get", "/models", { query: { adapted: false, limit: 1000, ...cursor } }));
    const hospital = place.peek().parameters.get("hospital") ?? "";
    const own = isWhole || hospital === "" ? [] : await adaptedTo(hospital);
    models.value = [...pages.flatMap((page) => page.models), ...own];
    modelsAreWhole.value = isWhole;
    unreadable.value = [...new Map([first.data, ...pages].flatMap((page) => page.unreadable).map((each) => [each.name, each])).values()];
    hospitals.value = registered.flatMap((page) => page.hospitals);
    catalogueError.value = null;
    catalogueLoaded.value = true;
  } catch (error) {
    catalogueError.value = error;
  }
}

/** Add the models that were adapted to a hospital, where the catalogue leaves them out. */
export async function loadAdapted(hospital: string): Promise<void> {
  if (modelsAreWhole.peek() || hospital === "") return;
  try {
    const own = await adaptedTo(hospital);
    models.value = [...models.peek().filter((each) => each.hospital !== hospital), ...own];
  } catch (error) {
    catalogueError.value = error;
  }
}

async function adaptedTo(hospital: string): Promise<Model[]> {
  return (await call("get", "/models", { query: { hospital } })).data.models;
}

/**
 * The hospital's id by the address, else by the last choice, else of the only one that the caller may see; else empty.
 *
 * An address decides alone: another hospital than it names would be a mistake that nobody sees.
 */
export function knownHospital(): string {
  const all = hospitals.peek();
  const isThere = (id: string | null) => all.some((each) => each.id === id);
  const named = place.peek().parameters.get("hospital");
  if (named !== null) return isThere(named) ? named : "";
  const last = rememberedHospital();
  return last !== null && isThere(last) ? last : all.length === 1 ? all[0]!.id : "";
}

/** How a request names it: a version that was adapted to a hospital needs its number. */
export function referenceOf(model: Model): string {
  return model.hospital !== null && model.latest !== null ? `${model.name}@${model.latest.version}` : model.name;
}
