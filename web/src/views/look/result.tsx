/** What an answer says: warnings, labels and volumes or classes, how sure it is, and the receipt. */
import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { models } from "../../app/catalogue";
import { Terms } from "../../app/glossary";
import { isDoubtful, rankInWords } from "../../app/review";
import { session } from "../../app/session";
import { CopyButton } from "../../ui/controls";
import { Dialog } from "../../ui/dialog";
import { count, many, percent, upperFirst } from "../../ui/format";
import { css, labelColour } from "../../viewer/palette";
import { joined, type Statistics } from "../../viewer/statistics";
import { type Answer, type Answered, asCurl, asCurlOfClasses, type Classified, type Report } from "./asking";

/** `member; site=CS` in words. `model` is the `name@version` that answered. */
export function servedBy({ personalization, model }: Pick<Answered, "personalization" | "model">): string {
  const [kind = "", detail = ""] = personalization.split(";").map((part) => part.trim());
  const named = detail.split("=")[1] ?? "";
  const imported = models.value.find((each) => each.name === model.split("@")[0])?.imported;
  const words: Record<string, string> = {
    global: imported ? `the model imported from ${imported}` : "the federation's model",
    member: `the model of ${named}`,
    hospital: `the version adapted to ${named}`,
    cluster: `the model of cluster ${named}`,
    scan: "a model adapted to this scan",
  };
  return words[kind] ?? personalization;
}

export function Result(given: {
  answer: Answer;
  /** What was sent. */
  scan: { files: readonly Blob[]; flat: boolean };
  /** Names of the mask's values that are not shown. */
  hidden: ReadonlySet<string>;
  onHide: (hidden: ReadonlySet<string>) => void;
  onFind: (voxel: [number, number, number]) => void;
  /** What the scan has under each value of the mask; null where that is not known. */
  statistics: ReadonlyMap<number, Statistics> | null;
  /** More to keep than the mask as it came. */
  saves?: ComponentChildren;
  /** What a person says of it. */
  verdict?: ComponentChildren;
}) {
  const { answer, hidden, onHide, onFind, statistics } = given;
  const { report } = answer;
  const toggle = (name: string) => {
    const next = new Set(hidden);
    if (!next.delete(name)) next.add(name);
    onHide(next);
  };
  const value = (name: string) => (
    <label class="check">
      <input type="checkbox" checked={!hidden.has(name)} onChange={() => toggle(name)} />
      <span class="swatch" style={{ background: css(labelColour(report.label_names[name]!)) }} />
      {name}
    </label>
  );
  const place = (name: string) => {
    const [, ...centre] = report.centroids[name] ?? [];
    return (
      centre.length === 3 && (
        <button
          type="button"
          class="button quiet small"
          onClick={() => onFind(centre as [number, number, number])}
          aria-label={`Show ${name}`}
        >
          Show
        </button>
      )
    );
  };
  // Where labels overlap, a value of the mask is a set of labels, and a label has several values.
  const isAlone = (name: string) => String(report.labels[name]?.classes) === String(report.label_names[name]);
  const sets = Object.keys(report.label_names).filter((name) => !isAlone(name));
  return (
    <section class="card stack" aria-label="Answer" data-tour="answer">
      <Heading answer={answer} warnings={report.warnings} />
      <table>
        <thead>
          <tr>
            <th scope="col">
              <Terms text="Label" />
            </th>
            <th scope="col" class="number">
              Size
            </th>
            <th scope="col">
              <span class="visually-hidden">Place</span>
            </th>
          </tr>
        </thead>
        <tbody>
          {Object.entries(report.labels).map(([name, label]) => (
            <tr key={name}>
              <td>
                {isAlone(name) ? value(name) : name}
                {statistics && <Intensities found={label.classes.flatMap((each) => statistics.get(each) ?? [])} />}
                <Surety label={label} whose={answer.question.hospital === "" ? "the answers without a hospital" : "this hospital's answers"} />
              </td>
              <td class="number">{sizeOf(label)}</td>
              <td class="number">{isAlone(name) && place(name)}</td>
            </tr>
          ))}
        </tbody>
        {sets.length > 0 && (
          <tbody>
            <tr>
              <th scope="rowgroup" colSpan={3}>
                Shown as
              </th>
            </tr>
            {sets.map((name) => (
              <tr key={name}>
                <td colSpan={2}>{value(name)}</td>
                <td class="number">{place(name)}</td>
              </tr>
            ))}
          </tbody>
        )}
      </table>
      <Papers receipt={report.receipt} curl={asCurl(answer, given.scan, session.value?.authenticated ?? false)}>
        <SaveMask mask={answer.mask} scan={given.scan.files} />
        {given.saves}
      </Papers>
      {given.verdict}
    </section>
  );
}

/** The intensities under a label, of which the mask may have several values. */
function Intensities({ found }: { found: readonly Statistics[] }) {
  const all = joined(found);
  if (all === null) return null;
  const short = (value: number) => Number(value.toPrecision(4));
  return (
    <p class="hint">
      Mean {short(all.mean)} ± {short(all.sd)}, {short(all.least)} to {short(all.most)}
    </p>
  );
}

/** The mask as it came, on the scan's own grid: NRRD of a volume, PNG of a picture. */
function SaveMask({ mask, scan }: { mask: Answer["mask"]; scan: readonly Blob[] }) {
  const [address, setAddress] = useState<string>();
  useEffect(() => {
    const made = URL.createObjectURL(mask.file);
    setAddress(made);
    return () => URL.revokeObjectURL(made);
  }, [mask.file]);
  return (
    <a class="button small" href={address} download={prefixOf(scan) + mask.name}>
      Save the mask
    </a>
  );
}

/** How the files that are saved of a scan begin. The names of a series name slices. */
export function prefixOf(scan: readonly Blob[]): string {
  const [only] = scan.length === 1 ? scan : [];
  return only instanceof File ? `${only.name.replace(/(\.nii)?\.[^.]*$/i, "")}-` : "";
}

/** The classes of an image, or of a volume's slices in the mean, the most probable first. */
export function Classes({ answer }: { answer: Classified }) {
  const { report } = answer;
  const classes = Object.entries(report.probabilities).sort(([, one], [, other]) => other - one);
  return (
    <section class="card stack" aria-label="Answer">
      <Heading answer={answer} warnings={report.warnings} />
      <table>
        <thead>
          <tr>
            <th scope="col">Class</th>
            <th scope="col" class="number">
              Probability
            </th>
          </tr>
        </thead>
        <tbody>
          {classes.map(([name, probability]) => (
            <tr key={name}>
              <td>
                {name === report.predicted ? <strong>{name}</strong> : name}
                <meter class="meter plain" min={0} max={1} value={probability} aria-label={`Probability of ${name}`} />
              </td>
              <td class="number">{percent(probability)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {report.slices && <p class="hint">The mean over {report.slices.length} slices.</p>}
      <Certainty value={report.entropy} />
      <Papers receipt={report.receipt} curl={asCurlOfClasses(answer.question, session.value?.authenticated ?? false)} />
    </section>
  );
}

/** The stage has the warnings, on the picture: here stands, first, that there are some. */
function Heading({ answer, warnings }: { answer: Answered; warnings: readonly string[] }) {
  return (
    <>
      <div class="stack tight">
        <h2>Answer</h2>
        {warnings.length > 0 && (
          <p>
            <span class="chip warn">{many(warnings.length, "warning")}, above the picture</span>
          </p>
        )}
        <p class="soft">
          By <Terms text={servedBy(answer)} />, <span class="mono">{answer.model}</span>
        </p>
      </div>
    </>
  );
}

/** The receipt, and the request as a command, after what else there is to keep. */
function Papers(given: { receipt: Report["receipt"]; curl: string; children?: ComponentChildren }) {
  const { receipt, curl } = given;
  const [isOpen, setOpen] = useState(false);
  const text = JSON.stringify(receipt, null, 2);
  return (
    <>
      <div class="row">
        {given.children}
        <button type="button" class="button small" onClick={() => setOpen(true)}>
          Receipt
        </button>
        <CopyButton label="Copy as curl" text={curl} />
      </div>
      {isOpen && (
        <Dialog title="Receipt" onClose={() => setOpen(false)}>
          <div class="stack">
            <p class="soft">What was asked, and exactly what answered. The same scan and graph give the same answer.</p>
            <pre>{text}</pre>
            <div class="row">
              <CopyButton label="Copy the receipt" text={text} />
            </div>
          </div>
        </Dialog>
      )}
    </>
  );
}

/** In millilitres, or in pixels of a picture. */
export function sizeOf({ voxels, volume_ml: volume }: Report["labels"][string]): string {
  return volume == null ? `${count(voxels)} px` : `${volume.toFixed(volume < 10 ? 2 : 1)} mL`;
}

/** Beside the hospital's other answers, since a confidence has no meaning by itself. */
function Surety({ label, whose }: { label: Report["labels"][string]; whose: string }) {
  return (
    <p class="hint">
      {isDoubtful(label.review) && (
        <>
          <span class="chip warn">look twice</span>{" "}
        </>
      )}
      <Terms text={`${upperFirst(rankInWords(label.review, whose))}; confidence ${label.confidence.toFixed(2)}`} />
    </p>
  );
}

/** The classes' probabilities have no rank yet: how undecided they are is said by itself. */
function Certainty({ value }: { value: number }) {
  const words = value < 0.15 ? "low" : value < 0.35 ? "moderate" : "high";
  return (
    <div class="field">
      <span class="label">
        <Terms text={`Uncertainty: ${words} (${value.toFixed(2)})`} />
      </span>
      <meter class="meter" min={0} low={0.15} high={0.35} max={1} optimum={0} value={value} aria-label="Uncertainty, 0 to 1" />
      <p class="hint">How undecided the model is where it sees something: 0 is certain. It is not a probability of error.</p>
    </div>
  );
}
