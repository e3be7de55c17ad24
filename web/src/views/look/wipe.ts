/** Where the new answer covers the kept one: right of a border in each plane. */
import type { Tile } from "../../viewer/viewer";

/** A border, in pixels of the canvas, and where its plane ends. */
export interface Border {
  at: number;
  end: number;
  top: number;
  height: number;
}

/** The border of each plane, at this share of its width. */
export const bordersOf = (tiles: readonly Tile[], share: number): Border[] =>
  tiles.map(({ left, top, width, height }) => ({ at: left + share * width, end: left + width, top, height }));

/** What is right of the borders, as a `clip-path`. */
export const rightOf = (borders: readonly Border[]): string =>
  `path("${borders.map(({ at, end, top, height }) => `M${at} ${top}H${end}V${top + height}H${at}Z`).join("")}")`;
