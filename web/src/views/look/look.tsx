/** Look: a scan and its mask. */
import { effect, signal } from "@preact/signals";
import { useEffect, useState } from "preact/hooks";
import { catalogueError, catalogueLoaded, hospitals, loadCatalogue, referenceOf } from "../../app/catalogue";
import { keepInAddress, place } from "../../app/router";
import { DropZone, Range, Segmented } from "../../ui/controls";
import { Notice, Rejection } from "../../ui/notice";
import { maskColours } from "../../viewer/palette";
import { Pane } from "../../viewer/pane";
import { maskOfPicture } from "../../viewer/picture";
import type { Layout, Viewer } from "../../viewer/viewer";
import { Choices, segmenters } from "./choices";
import "./look.css";
import { Result } from "./result";
import { answer, cancel, failure, openFiles, progress, question, scan, segment } from "./state";
import type { Personalization } from "./asking";

const LAYOUTS: readonly { value: Layout; label: string }[] = [
  { value: "planes", label: "All planes" },
  { value: "axial", label: "Axial" },
  { value: "coronal", label: "Coronal" },
  { value: "sagittal", label: "Sagittal" },
  { value: "render", label: "3-D" },
];

const layout = signal<Layout>("planes");
const opacity = signal(0.55);
const hidden = signal<ReadonlySet<number>>(new Set());

export default function Look() {
  const [viewer, setViewer] = useState<Viewer | null>(null);
  useEffect(() => void chooseFirst(), []);
  useEffect(() => (viewer ? follow(viewer) : undefined), [viewer]);
  const open = scan.value;
  return (
    <div class="look">
      <div class="look-side stack">
        <h1>Look at a scan</h1>
        <DropZone label="Drop a scan here, or choose a file" onFiles={(files) => void openFiles(files)}>
          <span class="hint">NIfTI volume or PNG picture. It is deleted after its answer.</span>
        </DropZone>
        <Rejection error={catalogueError.value} />
        {catalogueLoaded.value && segmenters().length === 0 ? (
          <Notice tone="warn" title="No model segments scans here">
            Publish a model into the store of this service.
          </Notice>
        ) : (
          <Choices question={question.value} onChange={choose} />
        )}
        <Run />
        <Rejection error={failure.value} />
        {answer.value && (
          <Result
            answer={answer.value}
            hidden={hidden.value}
            onHide={(next) => (hidden.value = next)}
            onFind={(voxel) => viewer?.moveTo(voxel)}
          />
        )}
      </div>
      <section class="look-stage" aria-label="Viewer">
        <div class="look-tools">
          <strong class="name">{open?.name ?? "No scan"}</strong>
          {open && !open.flat && (
            <Segmented label="Planes" value={layout.value} options={LAYOUTS} onChange={(value) => (layout.value = value)} />
          )}
          {answer.value && (
            <Range label="Mask" value={opacity.value} onInput={(value) => (opacity.value = value)} />
          )}
        </div>
        {open ? (
          <Pane label={`Scan ${open.name}`} onOpen={setViewer} onClose={() => setViewer(null)} />
        ) : (
          <p class="look-empty">Drop a scan on the left to see it here.</p>
        )}
      </section>
    </div>
  );
}

function Run() {
  const found = progress.value;
  if (found === null) {
    return (
      <button
        type="button"
        class="button primary"
        disabled={scan.value === null || question.value.model === ""}
        onClick={() => void segment()}
      >
        Segment
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

function choose(next: typeof question.value): void {
  question.value = next;
  const { model, hospital, personalization } = next;
  keepInAddress({ model, hospital, personalization: personalization === "auto" ? "" : personalization });
}

/** Take the choice from the address, else the first model. */
async function chooseFirst(): Promise<void> {
  await loadCatalogue();
  const wanted = place.peek().parameters;
  const present = segmenters();
  const found = present.find((each) => referenceOf(each) === (wanted.get("model") ?? question.peek().model));
  const model = found ?? present.find((each) => each.hospital === null) ?? present[0];
  if (model === undefined) return;
  const hospital = wanted.get("hospital") ?? question.peek().hospital;
  question.value = {
    ...question.peek(),
    model: referenceOf(model),
    hospital: hospitals.peek().some((each) => each.id === hospital) ? hospital : "",
    personalization: (wanted.get("personalization") ?? question.peek().personalization) as Personalization,
  };
}

/** Show in the viewer what the signals say, until the viewer is closed. */
function follow(viewer: Viewer): () => void {
  const stops = [
    effect(() => {
      const found = scan.value;
      if (found) void viewer.show(found.shown, found.flat).then(() => draw(viewer), fail);
    }),
    effect(() => {
      void answer.value;
      void draw(viewer).catch(fail);
    }),
    effect(() => viewer.layout(scan.value?.flat ? "axial" : layout.value)),
    effect(() => viewer.opacity("mask", opacity.value)),
    effect(() => {
      if (answer.value) viewer.colours("mask", maskColours(answer.value.report.label_names, hidden.value));
    }),
  ];
  return () => stops.forEach((stop) => stop());
}

async function draw(viewer: Viewer): Promise<void> {
  const found = answer.peek();
  if (found === null || !viewer.hasScan) {
    viewer.removeOverlay("mask");
    return;
  }
  const { file, name, flat } = found.mask;
  await viewer.overlay("mask", flat ? await maskOfPicture(file) : file, flat ? "mask.nii" : name);
  viewer.colours("mask", maskColours(found.report.label_names, hidden.peek()));
  viewer.opacity("mask", opacity.peek());
}

function fail(error: unknown): void {
  failure.value = error;
}
