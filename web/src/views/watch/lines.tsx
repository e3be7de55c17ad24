/** The numbers of a scanner's newest answers as small lines, with a rule where something else changed. */
import { many, moment } from "../../ui/format";
import { changeInWords, type Details, type Event, valueInWords, type Watch } from "./words";

type Point = Details["points"][number];

/** Lines that are shown at once: those that alarm or are near first. */
const FIRST = 5;
/** A sum that is so far on the way to its limit. */
const NEAR = 0.7;
const SIZE = { width: 200, height: 40, margin: 4 };
/** Answers of which the line is the median: one answer is no change. */
const AROUND = 4;
/** The share of the values beyond the picture's upper edge, and beyond its lower one. */
const BEYOND = 0.02;

/** `points` and `events` are the scanner's own. */
export function Lines({ watch, points, events }: { watch: Watch; points: readonly Point[]; events: readonly Event[] }) {
  const begin = Date.parse(points[0]?.at ?? "");
  const changes = events.filter((each) => each.kind !== "alarm" && Date.parse(each.at) >= begin);
  const alarmed = new Map(watch.alarms.map((each) => [each.stream, each.since]));
  const names = [...new Set(points.flatMap((point) => Object.keys(point.values)))].sort(
    (one, other) => urgency(watch, other) - urgency(watch, one) || order(one) - order(other),
  );
  if (points.length < 2 || names.length === 0) return <p class="hint">Lines are drawn from the second answer on.</p>;
  const line = (name: string) => (
    <Line key={name} name={name} points={points} changes={changes} since={alarmed.get(name) ?? null} />
  );
  const most = Math.max(FIRST, names.filter((name) => urgency(watch, name) > 0).length);
  return (
    <div class="stack tight">
      <div class="watch-lines">{names.slice(0, most).map(line)}</div>
      {names.length > most && (
        <details>
          <summary>{many(names.length - most, "more number")}</summary>
          <div class="watch-lines">{names.slice(most).map(line)}</div>
        </details>
      )}
      {changes.length > 0 && (
        <p class="hint">Upright lines: {changes.map((each) => `${moment(each.at)}, ${changeInWords(each)}`).join("; ")}.</p>
      )}
    </div>
  );
}

function urgency(watch: Watch, name: string): number {
  if (watch.alarms.some((each) => each.stream === name)) return 2;
  return !watch.learning && (watch.streams[name] ?? 0) >= NEAR ? 1 : 0;
}

/** The shift says the most, and a confidence more than a volume. */
const order = (name: string): number => ["shift", "confidence", "volume"].findIndex((kind) => name.startsWith(kind));

function Line(given: {
  name: string;
  points: readonly Point[];
  changes: readonly Event[];
  /** When what alarms began. */
  since: string | null;
}) {
  const { name, points, changes, since } = given;
  const own = points.filter((point) => name in point.values);
  const [first, last] = [own[0], own.at(-1)];
  if (first === undefined || last === undefined) return null;
  const values = own.map((point) => point.values[name]!);
  const middle = values.map((_, i) => median(values.slice(Math.max(0, i - AROUND), i + AROUND + 1)));
  const sorted = [...values].sort((one, other) => one - other);
  const low = Math.min(sorted[Math.floor(BEYOND * (sorted.length - 1))]!, ...middle);
  const high = Math.max(sorted[Math.ceil((1 - BEYOND) * (sorted.length - 1))]!, ...middle);
  const x = (i: number) => (own.length === 1 ? SIZE.width / 2 : (SIZE.width * i) / (own.length - 1));
  const y = (value: number) => {
    const share = high === low ? 0.5 : (Math.min(high, Math.max(low, value)) - low) / (high - low);
    return SIZE.height - SIZE.margin - (SIZE.height - 2 * SIZE.margin) * share;
  };
  const drawn = (of: readonly number[], from = 0) => of.map((value, i) => `${x(from + i).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  const at = (time: string) => own.findIndex((point) => Date.parse(point.at) >= Date.parse(time));
  const begun = since === null ? -1 : at(since);
  const now = valueInWords(name, middle.at(-1)!);
  const rules = changes.map((each) => ({ change: each, place: at(each.at) })).filter(({ place }) => place >= 0);
  const words = [
    `${name}, ${many(own.length, "answer")} from ${moment(first.at)} to ${moment(last.at)}`,
    `from ${valueInWords(name, middle[0]!)} to ${now}`,
    ...rules.map(({ change }) => `${changeInWords(change)} on ${moment(change.at)}`),
    ...(since === null ? [] : [`not as it was since ${moment(since)}`]),
  ].join("; ");
  return (
    <figure class="watch-line">
      <figcaption class="hint">
        <span class="clip">{name}</span> <span class="mono">{now}</span>
      </figcaption>
      <svg viewBox={`0 0 ${SIZE.width} ${SIZE.height}`} preserveAspectRatio="none" role="img" aria-label={words}>
        {rules.map(({ change, place }) => (
          <path key={change.id} class="rule" d={`M${x(place)},0 V${SIZE.height}`} />
        ))}
        <polyline class="each" points={drawn(values)} />
        <polyline class="middle" points={drawn(middle)} />
        {begun >= 0 && <polyline class="changed" points={drawn(middle.slice(begun), begun)} />}
      </svg>
    </figure>
  );
}

function median(values: readonly number[]): number {
  const sorted = [...values].sort((one, other) => one - other);
  const half = sorted.length >> 1;
  return sorted.length % 2 === 1 ? sorted[half]! : (sorted[half - 1]! + sorted[half]!) / 2;
}
