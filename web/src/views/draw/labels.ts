/** Which values of a mask a model's task names. */
import { call } from "../../api/client";
import type { Model } from "../../app/catalogue";

export interface Label {
  value: number;
  name: string;
}

/** A drawing has a byte per voxel. */
const LARGEST = 255;

interface Task {
  labels?: Record<string, number[]>;
}

/** A value for each set of labels that share voxels: `disc` and `disc + cup`. Of several values, the first. */
export async function labelsOf(model: Model): Promise<Label[]> {
  const path = { model: model.name, version: model.latest!.version };
  const { data } = await call("get", "/models/{model}/versions/{version}", { path });
  const names = new Map<number, string[]>();
  for (const [name, values] of Object.entries((data.manifest.task as Task).labels ?? {})) {
    for (const value of values) names.set(value, [...(names.get(value) ?? []), name]);
  }
  const found = new Map<string, number>();
  for (const value of [...names.keys()].sort((one, other) => one - other)) {
    const name = names.get(value)!.join(" + ");
    if (!found.has(name) && value <= LARGEST) found.set(name, value);
  }
  return [...found].map(([name, value]) => ({ name, value }));
}
