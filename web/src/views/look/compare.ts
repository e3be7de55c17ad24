/** How far two masks agree, label by label. */
import { call } from "../../api/client";
import type { Report } from "./asking";

type Size = Report["labels"][string];

export interface Agreement {
  name: string;
  kept: Size;
  now: Size;
  /** Null where neither has the label. */
  dice: number | null;
}

/** Compare two masks on one grid by the labels that both reports name. */
export function agreement(
  before: ArrayLike<number>,
  after: ArrayLike<number>,
  one: Pick<Report, "labels">,
  other: Pick<Report, "labels">,
): Agreement[] {
  const names = Object.keys(one.labels).filter((name) => name in other.labels);
  return names.map((name) => {
    const [kept, now] = [one.labels[name]!, other.labels[name]!];
    return { name, kept, now, dice: diceOf(before, kept.classes, after, now.classes) };
  });
}

/** Dice of the voxels that have one of these values in each of two masks on one grid; null where neither has one. */
function diceOf(
  before: ArrayLike<number>,
  valuesBefore: readonly number[],
  after: ArrayLike<number>,
  valuesAfter: readonly number[],
): number | null {
  const [inOne, inOther] = [new Set(valuesBefore), new Set(valuesAfter)];
  let [a, b, both] = [0, 0, 0];
  for (let i = 0; i < before.length; i++) {
    const [isOne, isOther] = [inOne.has(before[i]!), inOther.has(after[i]!)];
    a += Number(isOne);
    b += Number(isOther);
    both += Number(isOne && isOther);
  }
  return a + b === 0 ? null : (2 * both) / (a + b);
}

/** A mask as the viewer reads it. */
interface Grid {
  img?: ArrayLike<number> | null | undefined;
  hdr?: { dims: readonly number[]; affine: readonly (readonly number[])[] } | null | undefined;
}

export interface DrawnAgreement {
  name: string;
  /** The drawn mask's values that are read as this label. */
  values: readonly number[];
  /** Null where neither mask has the label. */
  dice: number | null;
}

/**
 * Dice of each label of an answer with a drawn mask.
 *
 * A drawn mask has values without names: they are read as the answer's task names them. None where the mask has a value
 * that this task does not name, since it was drawn for another one, or where the two are on other grids.
 */
export async function agreementWithDrawn(
  answer: { model: string; report: Pick<Report, "labels"> },
  found: Grid,
  drawn: Grid & { values: readonly number[] },
): Promise<DrawnAgreement[]> {
  const [name = "", version = ""] = answer.model.split("@");
  const path = { model: name, version: Number(version) };
  const { data } = await call("get", "/models/{model}/versions/{version}", { path });
  const values = (data.manifest.task as { labels?: Record<string, number[]> }).labels ?? {};
  const named = new Set([0, ...Object.values(values).flat()]);
  if (!drawn.values.every((value) => named.has(value))) return [];
  if (!found.img || !drawn.img || !isSameGrid(found, drawn)) return [];
  return Object.entries(answer.report.labels).flatMap(([label, { classes }]) => {
    const own = values[label];
    return own === undefined ? [] : [{ name: label, values: own, dice: diceOf(drawn.img!, own, found.img!, classes) }];
  });
}

function isSameGrid({ hdr: one }: Grid, { hdr: other }: Grid): boolean {
  if (!one || !other) return false;
  const isSame = (a: readonly number[], b: readonly number[], tolerance: number) =>
    a.every((value, i) => Math.abs(value - (b[i] ?? NaN)) <= tolerance);
  return isSame(one.dims.slice(1, 4), other.dims.slice(1, 4), 0) && isSame(one.affine.flat(), other.affine.flat(), 1e-3);
}
