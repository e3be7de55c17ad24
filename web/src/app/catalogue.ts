/** Models and hospitals, which every view lists. */
import { signal } from "@preact/signals";
import { call, type Schema } from "../api/client";
import { has } from "./session";

export type Model = Schema<"ModelSummary">;
export type Hospital = Schema<"HospitalView">;

export const models = signal<Model[]>([]);
export const hospitals = signal<Hospital[]>([]);
/** Versions of the store that cannot be read, and why. */
export const unreadable = signal<Schema<"UnreadableModel">[]>([]);
export const catalogueError = signal<unknown>(null);
export const catalogueLoaded = signal(false);

export async function loadCatalogue(): Promise<void> {
  try {
    const [found, registered] = await Promise.all([
      call("get", "/models"),
      // A federation's operator sees no hospital.
      has("reader") ? call("get", "/hospitals") : null,
    ]);
    models.value = found.data.models;
    unreadable.value = found.data.unreadable;
    hospitals.value = registered?.data.hospitals ?? [];
    catalogueError.value = null;
    catalogueLoaded.value = true;
  } catch (error) {
    catalogueError.value = error;
  }
}

/** How a request names it: a version that was adapted to a hospital needs its number. */
export function referenceOf(model: Model): string {
  return model.hospital !== null && model.latest !== null ? `${model.name}@${model.latest.version}` : model.name;
}
