/** Look: a scan and its mask. */
import { computed, effect, type ReadonlySignal, signal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { Problem } from "../../api/client";
import { catalogueError, catalogueLoaded, hospitals, referenceOf } from "../../app/catalogue";
import type { Correctable } from "../../app/correcting";
import { isEmpty, Missing, NoModel } from "../../app/empty";
import { Terms } from "../../app/glossary";
import { keepInAddress, place } from "../../app/router";
import { has } from "../../app/session";
import { DropZone, Range, Segmented } from "../../ui/controls";
import { Notice, Rejection } from "../../ui/notice";
import { Empty } from "../../ui/states";
import { count, percent } from "../../ui/format";
import { css, DIFFERENCE, drawnColour, drawnColours, labelColour, maskColours, UNCERTAINTY } from "../../viewer/palette";
import { carry, takeCarried } from "../../viewer/carried";
import { gestures, Pane } from "../../viewer/pane";
import { maskOfPicture } from "../../viewer/picture";
import { type Layout, LAYOUTS } from "../../viewer/layouts";
import type { Statistics } from "../../viewer/statistics";
import type { Viewer } from "../../viewer/viewer";
import "../../viewer/stage.css";
import { isOutlined, Ruler, WindowControls } from "../../viewer/window";
import { answering, Choices, classifies } from "./choices";
import { type Answer, uncertaintyOf } from "./asking";
import { agreement, type Agreement, agreementWithDrawn, type DrawnAgreement } from "./compare";
import { choose, chooseFirst } from "./first";
import "./look.css";
import { Classes, Result, servedBy, sizeOf } from "./result";
import { Saves } from "./saving";
import { StoredScans } from "./stored";
import { Verdict } from "./verdict";
import { bordersOf, rightOf } from "./wipe";
import { answer, answerNow, cancel, classified, failure, kept, type OpenScan, openFiles, progress, question, scan } from "./state";

type Comparison = "new" | "kept" | "side" | "wipe" | "difference";
const COMPARISONS: readonly { value: Comparison; label: string }[] = [
  { value: "new", label: "New" },
  { value: "kept", label: "Kept" },
  { value: "side", label: "Side by side" },
  { value: "wipe", label: "Wipe" },
  { value: "difference", label: "Difference" },
];

const layout = signal<Layout>("planes");
const opacity = signal(0.55);
/** By name: another model's mask may have another value for the same label. */
const hidden = signal<ReadonlySet<string>>(new Set());
const uncertain = signal(false);
const drawnShown = signal(true);
const chosen = signal<Comparison>("new");
const wipe = signal(0.5);

/** Of the new answer. */
const statistics = signal<ReadonlyMap<number, Statistics> | null>(null);

const comparing = computed(() => kept.value !== null && answer.value !== null && kept.value !== answer.value);
// Two answers are seen side by side as soon as there are two.
effect(() => {
  if (comparing.value) chosen.value = "side";
});
const comparison = computed<Comparison>(() => (comparing.value ? chosen.value : "new"));
const isDouble = computed(() => comparison.value === "side" || comparison.value === "wipe");
/** What the first pane shows; the second one shows the new answer. */
const first = computed(() => (isDouble.value || comparison.value === "kept" ? kept.value : answer.value));

export default function Look() {
  // Without a model a scan that is open can still be looked at.
  if (isEmpty() && scan.value === null) return <Missing title="This service has no model yet" lacks="No model" hospital={false} />;
  return <Workbench />;
}

function Workbench() {
  const [viewer, setViewer] = useState<Viewer | null>(null);
  const [beside, setBeside] = useState<Viewer | null>(null);
  useEffect(chooseFirst, []);
  // The address brings a scan of a cohort back, and nothing brings back one from this computer.
  useEffect(() => {
    const ask = (event: BeforeUnloadEvent) => {
      if (scan.peek() !== null && !place.peek().parameters.get("scan")) event.preventDefault();
    };
    window.addEventListener("beforeunload", ask);
    return () => window.removeEventListener("beforeunload", ask);
  }, []);
  useEffect(() => (viewer ? follow(viewer, first) : undefined), [viewer]);
  useEffect(() => (beside ? follow(beside, answer) : undefined), [beside]);
  useEffect(() => {
    if (viewer && beside) viewer.link(beside);
    else viewer?.unlink();
  }, [viewer, beside]);
  const open = scan.value;
  const borders = comparison.value === "wipe" && viewer ? bordersOf(viewer.tiles.value, wipe.value) : [];
  const answered = answer.value ?? classified.value;
  const withDrawn = answer.value && open?.drawn && <WithDrawn answer={answer.value} open={open} viewer={viewer} />;
  return (
    <div class="workbench">
      <div class="workbench-side stack">
        <h1>Look at a scan</h1>
        <DropZone label="Drop a scan here, or choose files" multiple onFiles={(files) => {
            keepInAddress({ cohort: null, scan: null });
            void openFiles(files);
          }}>
          {answered === null && (
            <span class="hint">NIfTI (a file for each channel), NRRD, MetaImage, ANALYZE (.hdr with its .img), PNG, TIFF, or the DICOM files of a series. It is deleted after its answer.</span>
          )}
        </DropZone>
        <Rejection error={catalogueError.value} onRetry={chooseFirst} />
        {catalogueLoaded.value && answering().length === 0 && (
          <Notice tone="warn" title="No model answers for scans here">
            <NoModel lacks="No model that answers for scans" />
          </Notice>
        )}
        <Folded by={answered} summary={asked()}>
          {has("operator") && <StoredScans />}
          {(!catalogueLoaded.value || answering().length > 0) && (
            <>
              <Choices question={question.value} onChange={choose} />
              <Run />
            </>
          )}
        </Folded>
        <Rejection error={failure.value} />
        {classified.value && <Classes answer={classified.value} />}
        {answer.value && (
          <Result
            answer={answer.value}
            scan={open!}
            hidden={hidden.value}
            onHide={(next) => (hidden.value = next)}
            onFind={(voxel) => [viewer, beside].forEach((each) => each?.moveTo(voxel))}
            statistics={statistics.value}
            saves={<Saves answer={answer.value} scan={open!} viewer={viewer} />}
            verdict={
              answer.value.question.hospital !== "" && (
                <Verdict answer={correctableOf(answer.value, open!)} onCorrect={() => carry(open!.name, viewer)} />
              )
            }
          />
        )}
        {!comparing.value && withDrawn}
        {answer.value && <Kept viewer={viewer} />}
        {comparing.value && withDrawn}
      </div>
      <section class="stage" aria-label="Viewer" data-tour="stage">
        <div class="stage-tools">
          <strong class="name">{open?.name ?? "No scan"}</strong>
          {open && !open.flat && (
            <Segmented label="Planes" value={layout.value} options={LAYOUTS} onChange={(value) => (layout.value = value)} />
          )}
          {(answer.value || open?.drawn) && (
            <Range label="Mask" value={opacity.value} onInput={(value) => (opacity.value = value)} />
          )}
          {open?.drawn && (
            <label class="check">
              <input
                type="checkbox"
                checked={drawnShown.value}
                onChange={(event) => (drawnShown.value = event.currentTarget.checked)}
              />
              Drawn mask
              {open.drawn.values.map((value) =>
                value === 0 ? null : (
                  <span key={value} class="swatch" style={{ background: css(drawnColour(value)) }} title={`Value ${value}`} />
                ),
              )}
            </label>
          )}
          {answer.value && (
            <label class="check">
              <input
                type="checkbox"
                checked={uncertain.value}
                onChange={(event) => (uncertain.value = event.currentTarget.checked)}
              />
              Uncertainty
            </label>
          )}
          {answer.value && uncertain.value && (
            <span class="check">
              5 %
              <span class="scale" style={{ background: UNCERTAINTY }} />
              100 %
            </span>
          )}
          {comparing.value && (
            <Segmented
              label="Comparison"
              value={comparison.value}
              options={COMPARISONS}
              onChange={(value) => (chosen.value = value)}
            />
          )}
          {comparison.value === "wipe" && (
            <Range label="Border" step={0.01} value={wipe.value} onInput={(value) => (wipe.value = value)} />
          )}
          {comparison.value === "difference" &&
            DIFFERENCE.map((each) => (
              <span key={each.value} class="check">
                <span class="swatch" style={{ background: css(each.colour) }} />
                {each.words}
              </span>
            ))}
        </div>
        {open && (
          <WindowControls key={`${open.name} ${isDouble.value}`} viewers={[viewer, beside]}>
            <Ruler viewers={[viewer, beside]} />
          </WindowControls>
        )}
        {answered && answered.report.warnings.length > 0 && (
          <ul class="stage-warnings" role="status" aria-label="Warnings of this answer">
            {answered.report.warnings.map((warning) => (
              <li key={warning}>
                <Terms text={warning} />
              </li>
            ))}
          </ul>
        )}
        {open ? (
          <div class={`panes ${comparison.value}`} style={{ "--new": rightOf(borders) }}>
            <Pane
              label={isDouble.value ? `Scan ${open.name}, kept answer` : `Scan ${open.name}`}
              {...(isDouble.value ? { name: "Kept" } : { hint: gestures(open.flat) })}
              onOpen={setViewer}
              onClose={() => setViewer(null)}
            >
              {first.value && first.value !== answer.value && <Legend answer={first.value} />}
            </Pane>
            {isDouble.value && (
              <Pane
                label={`Scan ${open.name}, new answer`}
                {...(comparison.value === "side" ? { name: "New" } : {})}
                onOpen={setBeside}
                onClose={() => setBeside(null)}
              />
            )}
            {comparison.value === "wipe" && (
              <span class="pane-name" aria-hidden="true">
                New
              </span>
            )}
            {borders.map(({ at, top, height }, i) => (
              <i key={i} class="wipe-border" style={{ left: at, top, height }} />
            ))}
          </div>
        ) : (
          <Empty title="No scan is open">{progress.value ? `${progress.value.words} …` : "Drop a scan on the left to see it here."}</Empty>
        )}
      </section>
    </div>
  );
}

/** The kept answer's labels: those at the side are the new one's, and a model has colours of its own. */
function Legend({ answer: { report } }: { answer: Answer }) {
  return (
    <ul class="pane-legend" aria-label="Kept labels">
      {Object.entries(report.label_names).map(([name, value]) => (
        <li key={name} class="check">
          <span class="swatch" style={{ background: css(labelColour(value)) }} />
          {name}
        </li>
      ))}
    </ul>
  );
}

/** What was asked, which folds up below its answer: the answer is what a person came for. */
function Folded(given: { by: unknown; summary: string; children: ComponentChildren }) {
  const [isOpen, setOpen] = useState(given.by === null);
  useEffect(() => setOpen(given.by === null), [given.by]);
  // A kept answer is compared with another one, which is asked for here.
  useEffect(() => {
    if (kept.value !== null && kept.value === answer.value) setOpen(true);
  }, [kept.value]);
  return (
    <details
      class="question"
      data-tour="question"
      data-fresh={given.by === null}
      open={isOpen}
      onToggle={(event) => setOpen(event.currentTarget.open)}
    >
      <summary>{given.summary}</summary>
      <div class="stack">{given.children}</div>
    </details>
  );
}

/** The question in words: model, hospital, and who answers. */
function asked(): string {
  const { model, hospital } = question.value;
  const named = hospitals.value.find((each) => each.id === hospital)?.name;
  return `Ask again: ${[model, named].filter(Boolean).join(", ")}`;
}

/** The answer that others are compared with. */
function Kept({ viewer }: { viewer: Viewer | null }) {
  const found = kept.value;
  const [agreements, setAgreements] = useState<readonly Agreement[]>([]);
  useEffect(() => {
    setAgreements([]);
    const [one, other] = [kept.value, answer.value];
    if (!comparing.value || viewer === null || one === null || other === null) return;
    let over = false;
    Promise.all([readMask(viewer, one), readMask(viewer, other)]).then(
      ([before, after]) => {
        if (!over) setAgreements(agreement(before.img!, after.img!, one.report, other.report));
      },
      (error: unknown) => {
        if (!over) failure.value = error;
      },
    );
    return () => (over = true);
  }, [kept.value, answer.value, viewer]);
  return (
    <section class="card stack tight" aria-label="Comparison" data-tour="comparison">
      <h2>Compare</h2>
      {found === null || !comparing.value ? (
        <p class="hint">
          <Terms
            text={
              found === null
                ? "Keep this answer, then ask another model, hospital or version about the same scan."
                : "This answer is kept. Choose another model above, and segment again."
            }
          />
        </p>
      ) : (
        <p>
          Kept: by {servedBy(found)}, <span class="mono">{found.model}</span>
        </p>
      )}
      {agreements.length > 0 && (
        <div class="scroll"><table>
          <thead>
            <tr>
              <th scope="col">Label</th>
              <th scope="col" class="number">
                Kept
              </th>
              <th scope="col" class="number">
                New
              </th>
              <th scope="col" class="number">
                Dice
              </th>
            </tr>
          </thead>
          <tbody>
            {agreements.map(({ name, kept: before, now, dice }) => (
              <tr key={name}>
                <td>{name}</td>
                <td class="number">{sizeOf(before)}</td>
                <td class="number">
                  {sizeOf(now)}
                  <br />
                  <span class="soft">{changeOf(before, now)}</span>
                </td>
                <td class="number">{dice === null ? "–" : percent(dice, 1)}</td>
              </tr>
            ))}
          </tbody>
        </table></div>
      )}
      <div class="row">
        {found !== answer.value && (
          <button type="button" class="button small" onClick={() => (kept.value = answer.value)}>
            Keep this answer
          </button>
        )}
        {found !== null && (
          <button type="button" class="button small quiet" onClick={() => (kept.value = null)}>
            Compare no more
          </button>
        )}
      </div>
    </section>
  );
}

/** How far an answer agrees with the mask that a person drew. */
function WithDrawn({ answer: found, open, viewer }: { answer: Answer; open: OpenScan; viewer: Viewer | null }) {
  const [rows, setRows] = useState<readonly DrawnAgreement[]>([]);
  useEffect(() => {
    setRows([]);
    if (viewer === null) return;
    let over = false;
    Promise.all([readMask(viewer, found), readMap(viewer, open, open.drawn!.file)])
      .then(([mask, { img, hdr }]) => agreementWithDrawn(found, mask, { img, hdr, values: open.drawn!.values }))
      .then(
        (next) => over || setRows(next),
        (error: unknown) => {
          // A version that was removed meanwhile has no labels to compare by: the answer stands without the figure.
          if (!over && !(error instanceof Problem && error.status === 404)) failure.value = error;
        },
      );
    return () => {
      over = true;
    };
  }, [found, open, viewer]);
  if (rows.length === 0) return null;
  return (
    <section class="card stack tight" aria-label="Agreement">
      <h2>Beside the drawn mask</h2>
      <p>
        <Terms text="Dice" />: {rows.map(({ name, dice }) => `${name} ${dice === null ? "–" : percent(dice, 1)}`).join(", ")}
      </p>
      <p class="hint">
        A drawn mask does not name its labels: its values are read as {rows.map(meaning).join(", ")}. A version that learned
        from this very mask agrees with it more than with others.
      </p>
    </section>
  );
}

/** `1 and 2 = disc`: what the values of a drawn mask are taken for. */
const meaning = ({ name, values }: DrawnAgreement) => `${values.join(" and ")} = ${name}`;

/** `+1.2 mL`: how much larger the new one is. */
function changeOf(before: Agreement["kept"], now: Agreement["now"]): string {
  const sign = (value: number) => (value < 0 ? "−" : "+");
  if (before.volume_ml == null || now.volume_ml == null) {
    const more = now.voxels - before.voxels;
    return `${sign(more)}${count(Math.abs(more))} px`;
  }
  const more = now.volume_ml - before.volume_ml;
  return `${sign(more)}${Math.abs(more).toFixed(Math.abs(more) < 10 ? 2 : 1)} mL`;
}

function Run() {
  const found = progress.value;
  const model = answering().find((each) => referenceOf(each) === question.value.model);
  if (found === null) {
    return (
      <button
        type="button"
        class="button primary"
        disabled={scan.value === null || question.value.model === ""}
        onClick={() => void answerNow(classifies(model))}
      >
        {classifies(model) ? "Classify" : "Segment"}
      </button>
    );
  }
  return (
    <div class="stack tight" role="status">
      <div class="row">
        <span class="grow">{found.words} …</span>
        <button type="button" class="button small" onClick={cancel}>
          Cancel
        </button>
      </div>
      <progress max={1} value={found.share ?? undefined} aria-label={found.words} />
    </div>
  );
}

/** Show in the viewer what the signals say, until the viewer is closed. */
function follow(viewer: Viewer, shown: ReadonlySignal<Answer | null>): () => void {
  // One change after the other: an overlay that arrives late must not cover a newer one.
  let turn = Promise.resolve();
  const next = (change: () => Promise<void>) => {
    turn = turn.then(change).catch((error: unknown) => void (failure.value = error));
  };
  viewer.onLayout = (next) => (layout.value = next);
  const stops = [
    effect(() => {
      const found = scan.value;
      viewer.clear();
      if (found) {
        next(async () => {
          await viewer.show(found.shown, found.flat);
          takeCarried(found.name, viewer);
        });
      }
    }),
    effect(() => {
      void answer.value;
      statistics.value = null;
    }),
    effect(() => {
      const [found, isDifference] = [shown.value, comparison.value === "difference"];
      void scan.value;
      next(() => (isDifference ? drawDifference(viewer) : drawMask(viewer, found)));
    }),
    effect(() => {
      const [open, isShown] = [scan.value, drawnShown.value];
      next(() => drawDrawn(viewer, isShown ? open : null));
    }),
    effect(() => {
      const [open, found] = [scan.value, uncertain.value ? shown.value : null];
      next(async () => viewer.removeOverlay("uncertainty"));
      if (open === null || found === null) return;
      // Fetched beside the turns: a scan that is opened meanwhile is shown at once.
      const asked = new AbortController();
      uncertaintyOf(open, found, asked.signal).then(
        (file) =>
          next(async () => {
            if (!asked.signal.aborted) await drawUncertainty(viewer, open, file);
          }),
        (error: unknown) => {
          if (!asked.signal.aborted) failure.value = error;
        },
      );
      return () => asked.abort();
    }),
    effect(() => viewer.layout(scan.value?.flat ? "axial" : layout.value)),
    effect(() => viewer.outlines(isOutlined.value)),
    effect(() => {
      viewer.opacity("mask", opacity.value);
      viewer.opacity("drawn", opacity.value);
      viewer.opacity("difference", opacity.value);
    }),
    effect(() => {
      // A new answer's mask comes with its colours.
      const [isHidden, names] = [hidden.value, shown.peek()?.report.label_names];
      if (names) viewer.colours("mask", maskColours(names, isHidden));
    }),
  ];
  return () => stops.forEach((stop) => stop());
}

async function drawMask(viewer: Viewer, found: Answer | null): Promise<void> {
  viewer.removeOverlay("difference");
  if (found === null || !viewer.hasScan) {
    viewer.removeOverlay("mask");
    return;
  }
  const image = await readMask(viewer, found);
  if (found === answer.peek()) statistics.value = viewer.statistics(image);
  viewer.overlay("mask", image, opacity.peek(), maskColours(found.report.label_names, hidden.peek()));
}

/** The mask that a person drew, below the answer. */
async function drawDrawn(viewer: Viewer, open: OpenScan | null): Promise<void> {
  if (!open?.drawn || !viewer.hasScan) {
    viewer.removeOverlay("drawn");
    return;
  }
  const { file, values } = open.drawn;
  viewer.overlay("drawn", await readMap(viewer, open, file), opacity.peek(), drawnColours(values));
}

async function drawDifference(viewer: Viewer): Promise<void> {
  const [one, other] = [kept.peek(), answer.peek()];
  if (one === null || other === null || !viewer.hasScan) return;
  viewer.removeOverlay("mask");
  viewer.difference(await namedMask(viewer, one), await namedMask(viewer, other), opacity.peek());
}

async function drawUncertainty(viewer: Viewer, open: OpenScan, file: Blob): Promise<void> {
  if (viewer.hasScan) viewer.overlay("uncertainty", await readMap(viewer, open, file), 0.6);
}

const correctableOf = ({ question, report, model, mask }: Answer, { name, files, flat, shown }: OpenScan): Correctable => ({
  request: report.receipt.request,
  hospital: question.hospital,
  model,
  name,
  files,
  flat,
  shown,
  mask,
  names: report.label_names,
});

const namedMask = async (viewer: Viewer, found: Answer) => ({
  image: await readMask(viewer, found),
  names: found.report.label_names,
});

const readMask = async (viewer: Viewer, { mask }: Answer) =>
  mask.flat ? await viewer.read(await maskOfPicture(mask.file), "mask.nii") : await viewer.read(mask.file, mask.name);

/** A file of one value per voxel of the scan, which is a PNG for a picture. */
const readMap = async (viewer: Viewer, { flat }: OpenScan, file: Blob) =>
  flat ? await viewer.read(await maskOfPicture(file), "map.nii") : await viewer.read(file, "map.nii.gz");
