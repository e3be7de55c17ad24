/** How sure an answer is among a hospital's own, in words. A rank is a share: 0.03 of the newest answers were less sure. */

const LEAST = [1, 2, 5, 10, 20, 30, 50];
const SURER: readonly (readonly [number, string])[] = [
  [90, "nine in ten"],
  [75, "three in four"],
  [50, "half"],
];
/** Answers of which the rank is at most this are marked. */
const DOUBTFUL = 0.1;

export const isDoubtful = (rank: number | null): boolean => rank !== null && rank <= DOUBTFUL;

/** `whose`: such as "this hospital's answers". */
export function rankInWords(rank: number | null, whose: string): string {
  if (rank === null) return "too few answers yet to compare";
  const surer = SURER.find(([least]) => 100 * rank > least);
  if (surer !== undefined) return `surer than ${surer[1]} of ${whose}`;
  return `among the ${leastOf(rank)} % least sure of ${whose}`;
}

/** The same for a column of a table. */
export function rankInShort(rank: number | null): string {
  if (rank === null) return "too few answers yet";
  return 2 * rank > 1 ? "the surer half" : `the ${leastOf(rank)} % least sure`;
}

const leastOf = (rank: number): number => LEAST.find((each) => 100 * rank <= each) ?? 50;

/** The most doubtful first, those without a rank last, each in the order in which they came. */
export function mostDoubtfulFirst<T>(all: readonly T[], rankOf: (each: T) => number | null | undefined): T[] {
  return [...all].sort((one, other) => (rankOf(one) ?? 2) - (rankOf(other) ?? 2));
}
