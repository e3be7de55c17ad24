/** Colours of labels and of uncertainty, in the order of the mask's values. */

/** Okabe and Ito's colours, distinct for every kind of colour vision; as in styles/tokens.css. */
const LABELS: readonly (readonly [number, number, number])[] = [
  [230, 159, 0],
  [86, 180, 233],
  [0, 158, 115],
  [240, 228, 66],
  [204, 121, 167],
  [213, 94, 0],
  [0, 114, 178],
];

export type Colour = readonly [number, number, number];

/** The colour of a mask's value, from 1. */
export const labelColour = (value: number): Colour => LABELS[(value - 1) % LABELS.length]!;

export const css = ([red, green, blue]: Colour): string => `rgb(${red} ${green} ${blue})`;

/** Colour, opacity and name of each value (`I`), as NiiVue takes them. */
export interface ColourTable {
  R: number[];
  G: number[];
  B: number[];
  A: number[];
  I: number[];
  labels: string[];
}

/** The colour of a drawn mask's value, other than that of an answer's first labels. */
export const drawnColour = (value: number): Colour => labelColour(value + 2);

/** A look-up table for a drawn mask with these values. */
export function drawnColours(values: readonly number[]): ColourTable {
  const largest = Math.max(0, ...values);
  const table: ColourTable = { R: [0], G: [0], B: [0], A: [0], I: [0], labels: [""] };
  for (let value = 1; value <= largest; value++) addColour(table, value, drawnColour(value), values.includes(value), "");
  return table;
}

/** A look-up table for a mask with these names: the background and hidden values are transparent. */
export function maskColours(names: Readonly<Record<string, number>>, hidden: ReadonlySet<string> = new Set()) {
  const byValue = new Map(Object.entries(names).map(([name, value]) => [value, name]));
  const largest = Math.max(0, ...byValue.keys());
  const table: ColourTable = { R: [0], G: [0], B: [0], A: [0], I: [0], labels: [""] };
  for (let value = 1; value <= largest; value++) {
    const name = byValue.get(value) ?? "";
    addColour(table, value, labelColour(value), !hidden.has(name), name);
  }
  return table;
}

function addColour(table: ColourTable, value: number, [red, green, blue]: Colour, shown: boolean, label: string): void {
  table.R.push(red);
  table.G.push(green);
  table.B.push(blue);
  table.A.push(shown ? 255 : 0);
  table.I.push(value);
  table.labels.push(label);
}

/** Uncertainty from 5 to 100 percent, as NiiVue's `plasma` draws it. */
export const UNCERTAINTY = "linear-gradient(to right, rgb(13 8 135), rgb(156 23 158) 25%, rgb(237 121 83) 75%, rgb(240 249 33))";

/**
 * A difference of two masks: 1 only in the first, 2 only in the second, 3 another label in each.
 *
 * In colours that neither a label nor a scan has.
 */
export const DIFFERENCE: readonly { value: number; colour: Colour; words: string }[] = [
  { value: 1, colour: [150, 84, 255], words: "only in the kept answer" },
  { value: 2, colour: [178, 255, 46], words: "only in the new answer" },
  { value: 3, colour: [255, 45, 85], words: "another label in each" },
];
