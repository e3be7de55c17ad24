/** How a scan was seen in the view before: what a person corrects is where they saw it. */
import type { Sight, Viewer } from "./viewer";

let carried: { scan: string; sight: Sight } | null = null;

/** Keep window, zoom and cross-hair for the view that opens the scan next. */
export function carry(scan: string, viewer: Viewer | null): void {
  carried = viewer?.sight ? { scan, sight: viewer.sight } : null;
}

/** Show a scan as it was carried here; once. */
export function takeCarried(scan: string, viewer: Viewer): void {
  if (carried?.scan === scan) viewer.see(carried.sight);
  carried = null;
}
