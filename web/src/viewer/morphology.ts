/** Changes of a drawing that NiiVue does not know. Voxels are in canonical order: `x + columns * (y + rows * z)`. */
import { AXES, type Plane } from "./layouts";

export type Point = readonly [number, number, number];

/** A drawing: a value for each voxel, and the sizes of a voxel in millimetres (1 of a picture). */
export interface Grid {
  voxels: Uint8Array;
  size: Point;
  spacing: Point;
}

/** Whether the voxel of an index may get a value. */
export type May = (index: number, value: number) => boolean;

/** A slice of a grid: `at(column, row)` is the index of its voxel in the grid. */
function sliceOf({ size }: Grid, plane: Plane["number"], depth: number) {
  const strides = [1, size[0], size[0] * size[1]];
  const [u, v] = AXES[plane];
  const start = depth * strides[3 - u - v]!;
  return { width: size[u], height: size[v], at: (column: number, row: number) => start + column * strides[u]! + row * strides[v]! };
}

/** The axis across a plane. */
const across = (plane: Plane["number"]) => 3 - AXES[plane][0] - AXES[plane][1];

/** Draw a line with a round brush, `diameter` wide in millimetres, within one plane. */
export function brush(grid: Grid, plane: Plane["number"], from: Point, to: Point, diameter: number, value: number, may: May): void {
  const steps = Math.max(...from.map((each, axis) => Math.abs(to[axis]! - each)), 1);
  for (let step = 0; step <= steps; step++) {
    disc(grid, plane, from.map((each, axis) => Math.round(each + ((to[axis]! - each) * step) / steps)) as unknown as Point, diameter, value, may);
  }
}

function disc(grid: Grid, plane: Plane["number"], centre: Point, diameter: number, value: number, may: May): void {
  const [u, v] = AXES[plane];
  const { width, height, at } = sliceOf(grid, plane, centre[across(plane)]!);
  const [spacing_u, spacing_v] = [grid.spacing[u], grid.spacing[v]];
  const radius = diameter / 2;
  const [reach_u, reach_v] = [Math.floor(radius / spacing_u), Math.floor(radius / spacing_v)];
  for (let row = Math.max(0, centre[v] - reach_v); row <= Math.min(height - 1, centre[v] + reach_v); row++) {
    for (let column = Math.max(0, centre[u] - reach_u); column <= Math.min(width - 1, centre[u] + reach_u); column++) {
      if (Math.hypot((column - centre[u]) * spacing_u, (row - centre[v]) * spacing_v) > radius) continue;
      if (may(at(column, row), value)) grid.voxels[at(column, row)] = value;
    }
  }
}

/**
 * Fill the area of one value around a voxel, within its slice. Returns whether it did: an empty area that reaches the
 * border of the slice is not closed.
 */
export function fill(grid: Grid, plane: Plane["number"], seed: Point, value: number): boolean {
  const [u, v] = AXES[plane];
  const { width, height, at } = sliceOf(grid, plane, seed[across(plane)]!);
  const before = grid.voxels[at(seed[u], seed[v])]!;
  const found = new Set([seed[v] * width + seed[u]]);
  // A set is walked in the order in which it grows.
  for (const each of found) {
    const [column, row] = [each % width, Math.floor(each / width)];
    if (before === 0 && (column === 0 || row === 0 || column === width - 1 || row === height - 1)) return false;
    for (const [right, down] of BESIDE) {
      const [i, j] = [column + right, row + down];
      if (i >= 0 && j >= 0 && i < width && j < height && grid.voxels[at(i, j)] === before) found.add(j * width + i);
    }
  }
  for (const each of found) grid.voxels[at(each % width, Math.floor(each / width))] = value;
  return true;
}

const BESIDE = [
  [1, 0],
  [-1, 0],
  [0, 1],
  [0, -1],
] as const;

/**
 * Draw a label between the slices that have it, by the mean of their signed distances (Raya & Udupa, 1990).
 *
 * NiiVue's `interpolateMaskSlices` mixes the slices themselves, so that a shape that grows jumps once, and what was
 * drawn in between is not followed. Returns how many slices were filled.
 */
export function fillBetween(grid: Grid, plane: Plane["number"], value: number): number {
  const depths = grid.size[across(plane)]!;
  const slices = Array.from({ length: depths }, (_, depth) => sliceOf(grid, plane, depth));
  const { width, height } = slices[0]!;
  const each = (visit: (column: number, row: number) => void) => {
    for (let row = 0; row < height; row++) for (let column = 0; column < width; column++) visit(column, row);
  };
  const drawn = slices.flatMap(({ at }, depth) => {
    let has = false;
    each((column, row) => (has ||= grid.voxels[at(column, row)] === value));
    return has ? [depth] : [];
  });
  const distances = (depth: number) => {
    const inside = new Uint8Array(width * height);
    each((column, row) => (inside[row * width + column] = Number(grid.voxels[slices[depth]!.at(column, row)] === value)));
    const [u, v] = AXES[plane];
    return signedDistances(inside, width, height, grid.spacing[u], grid.spacing[v]);
  };
  let filled = 0;
  drawn.slice(1).forEach((to, i) => {
    const from = drawn[i]!;
    if (to - from < 2) return;
    const [below, above] = [distances(from), distances(to)];
    for (let depth = from + 1; depth < to; depth++, filled++) {
      const share = (depth - from) / (to - from);
      each((column, row) => {
        const pixel = row * width + column;
        const at = slices[depth]!.at(column, row);
        if (grid.voxels[at] === 0 && (1 - share) * below[pixel]! + share * above[pixel]! < 0) grid.voxels[at] = value;
      });
    }
  });
  return filled;
}

/** Distance to the border in millimetres, negative inside: two passes over the pixels beside (chamfer). */
function signedDistances(inside: Uint8Array, width: number, height: number, right: number, down: number): Float32Array {
  const slanted = Math.hypot(right, down);
  const to = (wanted: number) => {
    const found = Float32Array.from(inside, (each) => (each === wanted ? 0 : width * right + height * down));
    const relax = (column: number, row: number, side: 1 | -1) => {
      const near = (dx: number, dy: number, cost: number) => {
        const [i, j] = [column + dx * side, row + dy * side];
        if (i < 0 || j < 0 || i >= width || j >= height) return;
        const pixel = row * width + column;
        found[pixel] = Math.min(found[pixel]!, found[j * width + i]! + cost);
      };
      near(-1, 0, right);
      near(0, -1, down);
      near(-1, -1, slanted);
      near(1, -1, slanted);
    };
    for (let row = 0; row < height; row++) for (let column = 0; column < width; column++) relax(column, row, 1);
    for (let row = height - 1; row >= 0; row--) for (let column = width - 1; column >= 0; column--) relax(column, row, -1);
    return found;
  };
  const [toInside, toOutside] = [to(1), to(0)];
  return toInside.map((distance, i) => distance - toOutside[i]!);
}

/** Smooth a label in each slice: a voxel is what most of the nine around it are. Other labels stay as they are. */
export function smooth(grid: Grid, plane: Plane["number"], value: number): void {
  const before = grid.voxels.slice();
  for (let depth = 0; depth < grid.size[across(plane)]!; depth++) {
    const { width, height, at } = sliceOf(grid, plane, depth);
    for (let row = 0; row < height; row++) {
      for (let column = 0; column < width; column++) {
        const index = at(column, row);
        if (before[index] !== 0 && before[index] !== value) continue;
        let [around, have] = [0, 0];
        for (let j = Math.max(0, row - 1); j <= Math.min(height - 1, row + 1); j++) {
          for (let i = Math.max(0, column - 1); i <= Math.min(width - 1, column + 1); i++) {
            around += 1;
            have += Number(before[at(i, j)] === value);
          }
        }
        grid.voxels[index] = 2 * have > around ? value : 0;
      }
    }
  }
}
