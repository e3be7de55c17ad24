/** How far two answers agree, label by label. */
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
    const [inOne, inOther] = [new Set(kept.classes), new Set(now.classes)];
    let [a, b, both] = [0, 0, 0];
    for (let i = 0; i < before.length; i++) {
      const [isOne, isOther] = [inOne.has(before[i]!), inOther.has(after[i]!)];
      a += Number(isOne);
      b += Number(isOther);
      both += Number(isOne && isOther);
    }
    return { name, kept, now, dice: a + b === 0 ? null : (2 * both) / (a + b) };
  });
}
