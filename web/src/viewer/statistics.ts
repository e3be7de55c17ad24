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
