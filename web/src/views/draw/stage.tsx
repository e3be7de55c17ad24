/** The scan with its mask, the tools, and whether the mask is saved. */
import { effect, useSignal } from "@preact/signals";
import { useEffect, useRef, useState } from "preact/hooks";
import { call, Problem, type Schema } from "../../api/client";
import { type Model, referenceOf } from "../../app/catalogue";
import { type CohortScan, readMask, readScan, scansOf, type ScanPlace } from "../../app/cohorts";
import { address } from "../../app/router";
import { work } from "../../app/unsaved";
import { Range, Segmented } from "../../ui/controls";
import { Dialog } from "../../ui/dialog";
import { Rejection } from "../../ui/notice";
import { Empty, Loading } from "../../ui/states";
import type { Drawing, Tool } from "../../viewer/drawing";
import { type Layout, LAYOUTS } from "../../viewer/layouts";
import { css, labelColour, maskColours } from "../../viewer/palette";
import { Pane } from "../../viewer/pane";
import { maskAtOwnSize, maskOfPicture, scanOfPicture } from "../../viewer/picture";
import type { Viewer } from "../../viewer/viewer";
import "./draw.css";
import type { Label } from "./labels";
import { type SaveState, Saving } from "./saving";

type Mask = Schema<"MaskView">;

const TOOLS: readonly { value: Tool; label: string }[] = [
  { value: "move", label: "Point" },
  { value: "brush", label: "Brush" },
  { value: "outline", label: "Outline" },
  { value: "rectangle", label: "Rectangle" },
  { value: "ellipse", label: "Ellipse" },
  { value: "eraser", label: "Eraser" },
];
const WIDEST = 21;
const STATES: Record<SaveState, { words: string; tone: string }> = {
  saved: { words: "Saved", tone: "good" },
  changed: { words: "Not saved yet", tone: "warn" },
  saving: { words: "Saving …", tone: "accent" },
  failed: { words: "Not saved", tone: "bad" },
};

/** A scan that is open, and its drawing. */
interface Open {
  place: ScanPlace;
  flat: boolean;
  drawing: Drawing;
  saving: Saving;
}

export function Stage(given: {
  hospital: string;
  cohort: string;
  scan: CohortScan | null;
  model: Model;
  labels: readonly Label[];
  onMask: (name: string, mask: Mask | null) => void;
}) {
  const { hospital, cohort, scan, labels } = given;
  const [viewer, setViewer] = useState<Viewer | null>(null);
  const [opened, setOpened] = useState<Open | null>(null);
  // A key must not draw on the scan before: its strokes were saved already.
  const open = opened?.place.name === scan?.name && opened?.place.cohort === cohort ? opened : null;
  const [error, setError] = useState<unknown>(null);
  const [again, setAgain] = useState(0);
  const [removing, setRemoving] = useState(false);
  const layout = useSignal<Layout>("axial");
  const tool = useSignal<Tool>("brush");
  const label = useSignal(0);
  const width = useSignal(3);
  const opacity = useSignal(0.6);
  const current = useRef<Open | null>(null);
  const turn = useRef(Promise.resolve());
  const latest = useRef(given);
  latest.current = given;

  // One scan after the other: what is chosen later wins.
  useEffect(() => {
    if (viewer === null || scan === null) return;
    let over = false;
    const place = { hospital, cohort, name: scan.name };
    setError(null);
    turn.current = turn.current
      .then(async () => {
        const found = await begin(viewer, place, () => latest.current);
        if (over || found === null) return;
        current.current = found;
        work.value = found.saving;
        setOpened(found);
      })
      .catch((reason: unknown) => {
        if (!over) setError(reason);
      });
    return () => {
      over = true;
      void leave(current.current);
      current.current = null;
      work.value = null;
      setOpened(null);
    };
  }, [viewer, cohort, scan?.name, again]);
  // At once, not with the next picture: a stroke may follow a key within it.
  useEffect(() => {
    if (open === null || labels.length === 0) return;
    const { drawing, flat } = open;
    const stops = [
      effect(() => drawing.colours(labelTable(labels), opacity.value)),
      effect(() => drawing.choose(tool.value, (labels[label.value] ?? labels[0]!).value, width.value)),
      effect(() => {
        viewer?.layout(flat ? "axial" : layout.value);
        drawing.layout(layout.value, flat);
      }),
    ];
    return () => stops.forEach((stop) => stop());
  }, [open, labels]);
  useEffect(() => {
    if (open === null) return;
    const warn = (event: BeforeUnloadEvent) => {
      if (open.saving.isSafe.peek()) return;
      void open.saving.now();
      event.preventDefault();
    };
    window.addEventListener("beforeunload", warn);
    return () => window.removeEventListener("beforeunload", warn);
  }, [open]);

  const keys = (event: KeyboardEvent) => {
    if (open === null || !press(event, open.drawing, { tool, label, width, labels: labels.length })) return;
    event.preventDefault();
    event.stopPropagation();
  };
  return (
    <section class="stage draw-stage" aria-label="Drawing" onKeyDownCapture={keys}>
      <div class="stage-tools">
        <strong class="name">{scan?.name ?? "No scan"}</strong>
        {open && scan && (
          <>
            <SaveMark saving={open.saving} />
            <span class="grow" />
            <a class="button small" href={address("look", { hospital, cohort, scan: scan.name, model: referenceOf(given.model) })}>
              Look
            </a>
            <button
              type="button"
              class="button small"
              onClick={() => {
                open.drawing.noTarget();
                // Also where nothing was drawn: an empty mask says that the scan was reviewed.
                open.saving.changed();
                void open.saving.now();
              }}
            >
              No target here
            </button>
            <button type="button" class="button small" disabled={!scan.mask} onClick={() => setRemoving(true)}>
              Remove the mask
            </button>
          </>
        )}
      </div>
      {open && (
        <div class="stage-tools" role="toolbar" aria-label="Drawing tools">
          <Segmented label="Tool" value={tool.value} options={TOOLS} onChange={(next) => (tool.value = next)} />
          <Segmented
            label="Label"
            value={String(label.value)}
            options={labels.map((each, i) => ({ value: String(i), label: each.name, swatch: css(labelColour(i + 1)) }))}
            onChange={(next) => (label.value = Number(next))}
          />
          <Undo drawing={open.drawing} />
          <Range label={`Width ${width.value}`} min={1} max={WIDEST} step={2} value={width.value} onInput={(next) => (width.value = next)} />
          <Range label="Mask" value={opacity.value} onInput={(next) => (opacity.value = next)} />
          {!open.flat && (
            <Segmented label="Planes" value={layout.value} options={LAYOUTS} onChange={(next) => (layout.value = next)} />
          )}
        </div>
      )}
      <div class="panes">
        {scan ? (
          <Pane
            label={`Drawing on ${scan.name}`}
            role="application"
            describedBy="draw-keys"
            onOpen={setViewer}
            onClose={() => setViewer(null)}
          />
        ) : (
          <Empty title="No scan is open">Choose a scan of the cohort on the left, or add one.</Empty>
        )}
        {scan && !open && !error && (
          <div class="stage-over">
            <Loading what="the scan" />
          </div>
        )}
        {error != null && (
          <div class="stage-over">
            <Rejection error={error} />
          </div>
        )}
        {open && <SaveFailure saving={open.saving} onReopen={() => (open.saving.drop(), setAgain(again + 1))} />}
      </div>
      <p class="stage-keys" id="draw-keys">
        Keys on the picture: arrows move, Page Up and Page Down change the slice, Space draws, Shift with an arrow draws a line, B brush, E
        eraser, 1 to 9 label, [ and ] width, Ctrl+Z undo.
      </p>
      {removing && open && scan && (
        <Dialog title="Remove the mask" onClose={() => setRemoving(false)}>
          <div class="stack">
            <p>The mask of {scan.name} is deleted. The scan stays, and counts as not reviewed.</p>
            <div class="row">
              <button
                type="button"
                class="button danger"
                onClick={() => {
                  open.saving.drop();
                  setRemoving(false);
                  call("delete", "/hospitals/{hospital}/cohorts/{cohort}/scans/{name}/mask", { path: { ...open.place } }).then(() => {
                    given.onMask(scan.name, null);
                    setAgain(again + 1);
                  }, setError);
                }}
              >
                Remove the mask
              </button>
            </div>
          </div>
        </Dialog>
      )}
    </section>
  );
}

/** Show a scan with its mask, ready to draw. Null where the viewer was closed meanwhile. */
async function begin(
  viewer: Viewer,
  place: ScanPlace,
  now: () => { model: Model; onMask: (name: string, mask: Mask | null) => void },
): Promise<Open | null> {
  const { Drawing } = await import("../../viewer/drawing");
  // The list may be older than another person's mask.
  const listed = (await scansOf(place.hospital, place.cohort)).find((each) => each.name === place.name);
  const [shown, mask] = await Promise.all([readScan(place, "display"), listed?.mask ? readMask(place) : null]);
  const { file, flat } = shown;
  await viewer.show(flat ? await scanOfPicture(file) : file, flat);
  if (!viewer.hasScan) return null;
  const before = mask === null ? null : flat ? await maskOfPicture(mask.file) : mask.file;
  const drawing = await Drawing.begin(viewer, before, () => saving.changed());
  let tag = mask?.tag ?? null;
  now().onMask(place.name, listed?.mask ?? null);
  const path = "/hospitals/{hospital}/cohorts/{cohort}/scans/{name}/mask";
  // Another person's mask is not overwritten, nor deleted.
  const condition = (): Record<string, string> => (tag === null ? {} : { "If-Match": tag });
  const saving = new Saving(() => {
    // A stroke that was undone or erased leaves no mask: an empty one would say that there is no target.
    if (drawing.saysNothing) {
      return async () => {
        if (tag !== null) await call("delete", path, { path: { ...place }, headers: condition() });
        tag = null;
        now().onMask(place.name, null);
      };
    }
    // Both copy the drawing now: the viewer may close before they are done.
    const content = flat ? maskAtOwnSize(file, mask?.file ?? null, drawing.rows()) : drawing.nifti();
    content.catch(() => undefined); // it is awaited, and reported, when its turn comes
    return async () => {
      const { data } = await call("put", path, {
        path: { ...place },
        query: { model: referenceOf(now().model) },
        body: new Blob([await content], { type: "application/octet-stream" }),
        headers: condition(),
      });
      tag = `"${data.sha256}"`;
      now().onMask(place.name, data);
    };
  });
  return { place, flat, drawing, saving };
}

/** Save what is not saved, which takes the drawing's state at once: the viewer is closed next. */
async function leave(open: Open | null): Promise<void> {
  await open?.saving.now();
  if (open && !open.saving.isSafe.peek()) {
    const reason = open.saving.error.peek();
    window.alert(`The mask of ${open.place.name} was not saved: ${reason instanceof Problem ? reason.detail : String(reason)}`);
  }
}

/** The values of the labels in their colours; another value of an older mask is grey. */
function labelTable(labels: readonly Label[]) {
  const table = maskColours(Object.fromEntries(labels.map((each) => [each.name, each.value])));
  table.I.forEach((value) => {
    const index = labels.findIndex((each) => each.value === value);
    const [red, green, blue] = index < 0 ? [160, 160, 160] : labelColour(index + 1);
    if (value > 0) [table.R[value], table.G[value], table.B[value]] = [red, green, blue];
  });
  return table;
}

/** Do what a key says. Returns whether it says something. */
function press(
  event: KeyboardEvent,
  drawing: Drawing,
  choice: { tool: { value: Tool }; label: { value: number }; width: { value: number }; labels: number },
): boolean {
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "z") {
    drawing.undo();
    return true;
  }
  if (!(event.target instanceof HTMLCanvasElement) || event.ctrlKey || event.metaKey || event.altKey) return false;
  const step = STEPS[event.key];
  if (step) {
    drawing.move(...step);
    if (event.shiftKey && step[0] !== "next") drawing.stroke();
    return true;
  }
  const key = event.key.toLowerCase();
  if (key === " ") drawing.stroke();
  else if (key === "b") choice.tool.value = "brush";
  else if (key === "e") choice.tool.value = "eraser";
  else if (key === "[") choice.width.value = Math.max(1, choice.width.value - 2);
  else if (key === "]") choice.width.value = Math.min(WIDEST, choice.width.value + 2);
  else if (/^[1-9]$/.test(key) && Number(key) <= choice.labels) choice.label.value = Number(key) - 1;
  else return false;
  return true;
}

const STEPS: Record<string, readonly ["right" | "up" | "next", 1 | -1]> = {
  ArrowRight: ["right", 1],
  ArrowLeft: ["right", -1],
  ArrowUp: ["up", 1],
  ArrowDown: ["up", -1],
  PageUp: ["next", 1],
  PageDown: ["next", -1],
};

function Undo({ drawing }: { drawing: Drawing }) {
  return (
    <button type="button" class="button small" disabled={drawing.undoable.value === 0} onClick={() => drawing.undo()}>
      Undo
    </button>
  );
}

function SaveMark({ saving }: { saving: Saving }) {
  const state = saving.state.value;
  return (
    <span class={`chip ${STATES[state].tone}`} role="status" data-save={state}>
      {STATES[state].words}
    </span>
  );
}

function SaveFailure({ saving, onReopen }: { saving: Saving; onReopen: () => void }) {
  if (saving.state.value !== "failed") return null;
  const error = saving.error.value;
  const isStale = error instanceof Problem && ["mask-stale", "mask-taken"].includes(error.slug);
  return (
    <div class="stage-over stack tight">
      <Rejection error={error} />
      <div class="row">
        <button type="button" class="button small" onClick={() => void saving.now()}>
          Try again
        </button>
        {isStale && (
          <button type="button" class="button small" onClick={onReopen}>
            Open the stored mask
          </button>
        )}
      </div>
    </div>
  );
}
