/** A version that answers unseen beside the one that serves: both on one chart, and what corrections say of them. */
import { useEffect, useState } from "preact/hooks";
import { call, type Schema } from "../../api/client";
import { Terms } from "../../app/glossary";
import { Segmented } from "../../ui/controls";
import { day, many } from "../../ui/format";
import { Rejection } from "../../ui/notice";

type Report = Schema<"ShadowReport">;
type Both = Schema<"BothFound">;
type Point = Report["points"][number];
type Value = number | null;

const SIZE = { width: 600, height: 56, margin: 5 };

/** The lanes of the chart, one below the other over the same answers. */
const LANES: readonly { title: string; digits: number; served: (both: Both) => Value; unseen: (both: Both) => Value; isDots?: boolean }[] = [
  { title: "Agreement of the two", digits: 2, served: () => null, unseen: (both) => both.agreement },
  { title: "Volume", digits: 1, served: (both) => both.served_ml ?? both.served_voxels, unseen: (both) => both.shadow_ml ?? both.shadow_voxels },
  { title: "Confidence", digits: 2, served: (both) => both.served_confidence, unseen: (both) => both.shadow_confidence },
  { title: "Dice with corrections", digits: 2, served: (both) => both.served_dice, unseen: (both) => both.shadow_dice, isDots: true },
];

/** The newest version that answered unseen; nothing where none ever did. */
export function Unseen({ hospital, model }: { hospital: string; model: string }) {
  const [report, setReport] = useState<Report | null>(null);
  const [error, setError] = useState<unknown>(null);
  useEffect(() => {
    let over = false;
    call("get", "/hospitals/{hospital}/serving/{model}/shadow", { path: { hospital, model } }).then(
      ({ data }) => over || setReport(data.shadows[0] ?? null),
      (problem) => over || setError(problem),
    );
    return () => (over = true);
  }, [hospital, model]);
  if (error) return <Rejection error={error} />;
  return report && <Compared report={report} />;
}

function Compared({ report }: { report: Report }) {
  const labels = Object.keys(report.labels);
  const [chosen, setChosen] = useState(labels[0] ?? "");
  const label = labels.includes(chosen) ? chosen : (labels[0] ?? "");
  const points = [...report.points].reverse().filter((each) => each.labels[label] !== undefined);
  const ended = report.ended === null ? "" : `, until ${day(report.ended)}`;
  return (
    <div class="stack tight" role="group" aria-label={`${report.artefact}, unseen`}>
      <h3>
        <span class="mono">{report.artefact}</span> answers unseen
      </h3>
      <p class="hint">
        <Terms text={`One scan in ${report.every} since ${day(report.began)}${ended}: ${many(report.answers, "answer")}. ${gained(report)}${ruled(report)}`} />
      </p>
      {labels.length > 1 && (
        <div class="row">
          <Segmented label="Label" value={label} options={labels.map((value) => ({ value, label: value }))} onChange={setChosen} />
        </div>
      )}
      {points.length < 2 ? (
        <p class="hint">The chart is drawn from the second answer on.</p>
      ) : (
        <>
          <p class="watch-legend">
            <span class="served">what serves</span> <span class="unseen">{report.artefact}</span>
          </p>
          <div class="watch-lanes">
            {LANES.map((lane) => (
              <Lane key={lane.title} lane={lane} label={label} points={points} />
            ))}
            <p class="hint watch-days">
              <span>{day(points[0]!.at)}</span> <span>{day(points.at(-1)!.at)}</span>
            </p>
          </div>
        </>
      )}
    </div>
  );
}

/** What corrections say of both, which is what decides. */
function gained({ corrected, gain, at_least }: Report): string {
  if (gain === null) return "None of them was corrected or accepted yet.";
  const least = at_least === null ? "" : `, at least ${signed(at_least)}`;
  return `On ${many(corrected, "answer")} that a person corrected or accepted, Dice changed by ${signed(gain)} points${least}.`;
}

const ruled = ({ rule, ended }: Report): string =>
  rule === null || ended !== null
    ? ""
    : ` It is assigned by itself where that bound is above ${signed(rule.gain ?? 0)} points after ${rule.corrections} of them.`;

const signed = (share: number): string => `${share < 0 ? "−" : "+"}${Math.abs(100 * share).toFixed(1)}`;

function Lane({ lane, label, points }: { lane: (typeof LANES)[number]; label: string; points: readonly Point[] }) {
  const found = points.map((each) => each.labels[label]!);
  const served: Value[] = found.map(lane.served);
  const unseen: Value[] = found.map(lane.unseen);
  const all = [...served, ...unseen].filter((value) => value !== null);
  if (all.length === 0) {
    return (
      <figure class="watch-lane">
        <figcaption class="hint">{lane.title}</figcaption>
        <p class="hint">none yet</p>
      </figure>
    );
  }
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const x = (place: number) => SIZE.margin + ((SIZE.width - 2 * SIZE.margin) * place) / Math.max(1, points.length - 1);
  const y = (value: number) =>
    SIZE.height - SIZE.margin - (SIZE.height - 2 * SIZE.margin) * (high === low ? 0.5 : (value - low) / (high - low));
  const places = (values: readonly Value[]) =>
    values.flatMap((value, place) => (value === null ? [] : [`${x(place).toFixed(1)},${y(value).toFixed(1)}`]));
  // A dot is a line without length: its cap stays round where the picture is stretched.
  const drawn = (values: readonly Value[], kind: string) =>
    lane.isDots ? (
      <path class={`${kind} dots`} d={places(values).map((each) => `M${each} h0`).join(" ")} />
    ) : (
      <polyline class={kind} points={places(values).join(" ")} />
    );
  const mean = (values: readonly Value[]) => {
    const there = values.filter((value) => value !== null);
    return there.length === 0 ? null : (there.reduce((sum, value) => sum + value, 0) / there.length).toFixed(lane.digits);
  };
  const [one, other] = [mean(served), mean(unseen)];
  const words = one === null ? `mean ${other}` : `mean ${one}, unseen ${other}`;
  return (
    <figure class="watch-lane">
      <figcaption class="hint">
        {lane.title}
        <span class="mono">{words}</span>
      </figcaption>
      <svg
        viewBox={`0 0 ${SIZE.width} ${SIZE.height}`}
        preserveAspectRatio="none"
        role="img"
        aria-label={`${label}: ${lane.title}, ${words}, over ${many(points.length, "answer")}, from ${low.toFixed(lane.digits)} to ${high.toFixed(lane.digits)}`}
      >
        {drawn(served, "served")}
        {drawn(unseen, "unseen")}
      </svg>
      <span class="hint mono watch-range">
        <span>{high.toFixed(lane.digits)}</span> <span>{low.toFixed(lane.digits)}</span>
      </span>
    </figure>
  );
}
