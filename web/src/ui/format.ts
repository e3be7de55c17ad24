/** Numbers, sizes and times in words. */

const NUMBERS = new Intl.NumberFormat("en");
const DAYS = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeZone: "UTC" });
const MOMENTS = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "short" });

export const count = (value: number): string => NUMBERS.format(value);

/** `1 scan`, `3 scans`. */
export const many = (value: number, thing: string): string => `${count(value)} ${thing}${value === 1 ? "" : "s"}`;

export function bytes(value: number): string {
  const units = ["B", "kB", "MB", "GB"];
  let size = value;
  let unit = 0;
  while (size >= 1000 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${unit === 0 ? size : size.toFixed(size < 10 ? 1 : 0)} ${units[unit]}`;
}

export const moment = (iso: string): string => MOMENTS.format(new Date(iso));
export const day = (iso: string): string => DAYS.format(new Date(iso));

export function duration(seconds: number): string {
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

export const upperFirst = (words: string): string => words.charAt(0).toUpperCase() + words.slice(1);

/** Words as a sentence of their own. */
export const sentence = (words: string): string => `${upperFirst(words)}${/[.!?]$/.test(words) ? "" : "."}`;

export const percent = (share: number, digits = 0): string => `${(100 * share).toFixed(digits)} %`;
