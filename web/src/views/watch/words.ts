/** The watch in words: its states, its numbers and what alarms say. */
import type { Schema } from "../../api/client";
import { count, day } from "../../ui/format";

export type Watch = Schema<"WatchView">;
export type Details = Schema<"WatchDetails">;
export type Event = Schema<"EventView">;
export type State = Watch["state"];
export type Stop = Watch["stop"];

/** From the calmest. */
export const STATES: readonly State[] = ["routine", "watch", "investigate"];
export const SILENCE = "silence";

export const urgency = ({ state }: Watch): number => STATES.indexOf(state);

/** The state of a strip is the worst of its scanners. */
export const worst = (watches: readonly Watch[]): State =>
  STATES[Math.max(0, ...watches.map(urgency))]!;

export const scannerName = (scanner: string | null): string => scanner || "scans of other or unknown scanners";

export const STOPS: readonly { value: Stop; label: string; words: string }[] = [
  { value: "warn", label: "Warn in every answer", words: "answers carry a warning" },
  { value: "global", label: "Let the federation's model answer", words: "the federation's model answers" },
  { value: "hold", label: "Answer nothing until a person has looked", words: "nothing is answered" },
];

/** `months`: between false alarms. */
export const everyMonths = (months: number): string => `one false alarm in ${months === 1 ? "a month" : `${count(months)} months`}`;

/** What is not as it was, such as "volume of liver is higher". */
export function alarmInWords(stream: string, up: boolean | null | undefined): string {
  if (stream === SILENCE) return "nothing arrives";
  if (stream === "warned") return "the guard warns more often";
  if (stream.startsWith("no ")) return `more answers have ${stream}`;
  return `${stream} is ${up === false ? "lower" : "higher"}`;
}

/** A watched number as a person reads it: the shift is stored as its logarithm. */
export function valueInWords(stream: string, value: number): string {
  if (stream === "shift") return Math.exp(value).toFixed(2);
  return stream.startsWith("volume") ? count(Number(value.toPrecision(3))) : value.toFixed(2);
}

const CHANGES: Record<Exclude<Event["kind"], "alarm">, string> = {
  version: "another version answers",
  software: "the scanner's software",
  locum: "Locum",
};

/** A change beside which alarms are read, such as "the scanner's software: 1 → 2". */
export function changeInWords({ kind, details }: Event): string {
  if (kind === "alarm" || kind === "version") return CHANGES.version;
  return `${CHANGES[kind]}: ${details.before} → ${details.after}`;
}

export const since = (iso: string | null): string => (iso === null ? "" : `since ${day(iso)}`);
