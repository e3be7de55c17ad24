/** The scan with its mask, the tools, and whether the mask is saved. */
import { effect, useSignal } from "@preact/signals";
import { useEffect, useRef, useState } from "preact/hooks";
import { call, Problem } from "../../api/client";
import { type Model, referenceOf } from "../../app/catalogue";
import type { CohortScan } from "../../app/cohorts";
import { address } from "../../app/router";
import { work } from "../../app/unsaved";
import { Segmented } from "../../ui/controls";
import { Dialog } from "../../ui/dialog";
import { Rejection } from "../../ui/notice";
import { Empty, Loading } from "../../ui/states";
import { carry } from "../../viewer/carried";
import type { Tool } from "../../viewer/drawing";
import { type Layout, LAYOUTS } from "../../viewer/layouts";
import { labelColour, maskColours } from "../../viewer/palette";
import { gestures, Pane } from "../../viewer/pane";
import type { Viewer } from "../../viewer/viewer";
import { isOutlined, Ruler, WindowControls } from "../../viewer/window";
import type { Progress } from "../look/asking";
import "./draw.css";
import { press } from "./keys";
import type { Label } from "./labels";
import { begin, type Open } from "./opening";
import { type SaveState, type Saving } from "./saving";
import { locked, only, Tools } from "./tools";

const STATES: Record<SaveState, { words: string; tone: string }> = {
  saved: { words: "Saved", tone: "good" },
  changed: { words: "Not saved yet", tone: "warn" },
  saving: { words: "Saving …", tone: "accent" },
  failed: { words: "Not saved", tone: "bad" },
};

export function Stage(given: {
  hospital: string;
  cohort: string;
  scan: CohortScan | null;
  model: Model;
  labels: readonly Label[];
  /** What a scan without a mask begins with. */
  begin: string;
  onMask: (name: string, mask: CohortScan["mask"] | null) => void;
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
  const width = useSignal(0);
  const [progress, setProgress] = useState<Progress | null>(null);
  const asking = useRef<AbortController | null>(null);
  const opacity = useSignal(0.6);
  const current = useRef<Open | null>(null);
  const turn = useRef(Promise.resolve());
  const latest = useRef(given);
  latest.current = given;

  const isNamed = labels.length > 0;

  // One scan after the other: what is chosen later wins.
  useEffect(() => {
    if (viewer === null || scan === null || !isNamed) return;
    let over = false;
    const mine = new AbortController();
    asking.current = mine;
    const place = { hospital, cohort, name: scan.name };
    setError(null);
    turn.current = turn.current
      .then(async () => {
        if (over) return;
        const found = await begin(viewer, place, () => latest.current, mine.signal, setProgress);
        if (over || found === null) return;
        if (width.peek() < found.drawing.finest) width.value = 3 * found.drawing.finest;
        current.current = found;
        work.value = found.saving;
        setOpened(found);
      })
      .catch((reason: unknown) => {
        if (!over) setError(reason);
      });
    return () => {
      over = true;
      mine.abort();
      void leave(current.current);
      current.current = null;
      work.value = null;
      setOpened(null);
    };
  }, [viewer, cohort, scan?.name, again, isNamed]);
  // At once, not with the next picture: a stroke may follow a key within it.
  useEffect(() => {
    if (open === null || labels.length === 0) return;
    const { drawing, flat } = open;
    const stops = [
      effect(() => drawing.colours(labelTable(labels), opacity.value, isOutlined.value)),
      effect(() => {
        const limits = { locked: locked.value, only: only.value };
        drawing.choose(tool.value, (labels[label.value] ?? labels[0]!).value, width.value, limits);
      }),
      effect(() => viewer?.layout(flat ? "axial" : layout.value)),
    ];
    // Two clicks with a brush are two strokes.
    if (viewer) viewer.onLayout = (next) => tool.peek() === "move" && (layout.value = next);
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

  // Of the window: a button that is disabled by its click has the focus no more.
  useEffect(() => {
    if (open === null || viewer === null) return;
    const keys = (event: KeyboardEvent) => {
      const isElsewhere = event.target instanceof Element && event.target.closest("dialog, input[type=number], input[type=text]") !== null;
      if (isElsewhere || !press(event, viewer, open.drawing, { tool, label, width }, labels.length)) return;
      event.preventDefault();
      event.stopPropagation();
    };
    window.addEventListener("keydown", keys, { capture: true });
    return () => window.removeEventListener("keydown", keys, { capture: true });
  }, [open, viewer, labels]);

  return (
    <section class="stage draw-stage" aria-label="Drawing">
      <div class="stage-tools">
        <strong class="name">{scan?.name ?? "No scan"}</strong>
        {open && scan && (
          <>
            <SaveMark open={open} />
            <span class="grow" />
            {!open.flat && <Segmented label="Planes" value={layout.value} options={LAYOUTS} onChange={(next) => (layout.value = next)} />}
            <a
              class="button small"
              href={address("look", { hospital, cohort, scan: scan.name, model: referenceOf(given.model) })}
              onClick={() => carry(scan.name, viewer)}
            >
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
      {scan && (
        <WindowControls key={scan.name} viewers={[viewer]}>
          {open && tool.value === "move" && <Ruler viewers={[viewer]} />}
        </WindowControls>
      )}
      {open && viewer && (
        <Tools viewer={viewer} drawing={open.drawing} flat={open.flat} labels={labels} choice={{ tool, label, width }} opacity={opacity} />
      )}
      <div class="panes">
        {scan ? (
          <Pane
            label={`Drawing on ${scan.name}`}
            role="application"
            describedBy="draw-keys"
            hint={gestures(open?.flat ?? false)}
            onOpen={setViewer}
            onClose={() => setViewer(null)}
          />
        ) : (
          <Empty title="No scan is open">Choose a scan of the cohort on the left, or add one.</Empty>
        )}
        {scan && !open && !error && (
          <div class="stage-over">
            {progress === null ? <Loading what="the scan" /> : <Asking progress={progress} onCancel={() => asking.current?.abort()} />}
          </div>
        )}
        {error != null && (
          <div class="stage-over">
            <Rejection error={error} />
          </div>
        )}
        {open && <SaveFailure saving={open.saving} onReopen={() => (open.saving.drop(), setAgain(again + 1))} />}
      </div>
      <p class="visually-hidden" id="draw-keys">
        Keys on the picture: arrows move, Page Up and Page Down change the slice, Space draws, Shift with an arrow draws a line, P point, B
        brush, O outline, F fill, E eraser, 1 to 9 label, [ and ] width, Ctrl+Z undo, Ctrl+Y redo.
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

/** What the model does before a person draws; without it the drawing is empty. */
function Asking({ progress: { words, share }, onCancel }: { progress: Progress; onCancel: () => void }) {
  return (
    <div class="stack tight" role="status">
      <div class="row">
        <span class="grow">For the mask to begin with: {words} …</span>
        <button type="button" class="button small" onClick={onCancel}>
          Begin with nothing
        </button>
      </div>
      <progress max={1} value={share ?? undefined} aria-label={words} />
    </div>
  );
}

/** Whether the mask is saved, since when, or that it is a model's which nobody has taken yet. */
function SaveMark({ open: { saving, drawing, drawnBy } }: { open: Open }) {
  const state = saving.state.value;
  const isProposal = drawing.isUntouched && state === "saved";
  const at = saving.at.value;
  const words = state === "saved" && at !== null ? `Saved by itself at ${at.toLocaleTimeString()}` : STATES[state].words;
  return (
    <>
      <span class={`chip ${isProposal ? "accent" : STATES[state].tone}`} role="status" data-save={isProposal ? "proposal" : state}>
        {isProposal ? `Drawn by ${drawnBy}, not saved` : words}
      </span>
      {isProposal && (
        <button
          type="button"
          class="button small"
          onClick={() => {
            drawing.accept();
            void saving.now();
          }}
        >
          Save it as it is
        </button>
      )}
    </>
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
