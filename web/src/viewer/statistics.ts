/** What a scan has under a mask. */

export interface Statistics {
  voxels: number;
  mean: number;
  /** Standard deviation. */
  sd: number;
  least: number;
  most: number;
}

/** The intensities (`voxel * slope + intercept`) under each value of a mask but 0. Null where the grids differ. */
export function statisticsOf(scan: ArrayLike<number>, mask: ArrayLike<number>, slope: number, intercept: number): Map<number, Statistics> | null {
  if (scan.length !== mask.length) return null;
  // Welford's update: sums of squares lose what differs little from a large mean.
  const found = new Map<number, Statistics & { squares: number }>();
  for (let i = 0; i < mask.length; i++) {
    const value = mask[i]!;
    const intensity = scan[i]! * slope + intercept;
    if (value === 0 || !Number.isFinite(intensity)) continue;
    let each = found.get(value);
    if (each === undefined) found.set(value, (each = { voxels: 0, mean: 0, sd: 0, squares: 0, least: Infinity, most: -Infinity }));
    const change = intensity - each.mean;
    each.voxels += 1;
    each.mean += change / each.voxels;
    each.squares += change * (intensity - each.mean);
    if (intensity < each.least) each.least = intensity;
    if (intensity > each.most) each.most = intensity;
  }
  for (const each of found.values()) each.sd = Math.sqrt(each.squares / each.voxels);
  return found;
}

/** The statistics of several areas together; null of none. */
export function joined(all: readonly Statistics[]): Statistics | null {
  const voxels = all.reduce((sum, each) => sum + each.voxels, 0);
  if (voxels === 0) return null;
  const mean = all.reduce((sum, each) => sum + each.voxels * each.mean, 0) / voxels;
  const variance = all.reduce((sum, each) => sum + each.voxels * (each.sd ** 2 + (each.mean - mean) ** 2), 0) / voxels;
  const [least, most] = [Math.min(...all.map((each) => each.least)), Math.max(...all.map((each) => each.most))];
  return { voxels, mean, sd: Math.sqrt(variance), least, most };
}
