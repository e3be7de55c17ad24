/** A scan with its drawing, the tools, and what becomes of it. */
import { effect, useSignal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { Problem } from "../../api/client";
import { work } from "../../app/unsaved";
import { Segmented } from "../../ui/controls";
import { Rejection } from "../../ui/notice";
import { Empty, Loading } from "../../ui/states";
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
import type { Open } from "./opening";
import type { Saving } from "./saving";
import { locked, only, Tools } from "./tools";

export function Stage(given: {
  /** What is open, and what it is called; null: nothing. */
  source: { id: string; name: string } | null;
  labels: readonly Label[];
  /** Open it. Null where the viewer was closed meanwhile. */
  begin: (viewer: Viewer, signal: AbortSignal, onProgress: (progress: Progress | null) => void) => Promise<Open | null>;
  /** What is said and done above the picture; `reopen` begins again. */
  actions: (open: Open, viewer: Viewer, reopen: () => void) => ComponentChildren;
}) {
  const { source, labels } = given;
  const [viewer, setViewer] = useState<Viewer | null>(null);
  const [opened, setOpened] = useState<Open | null>(null);
  // A key must not draw on the scan before: its strokes were saved already.
  const open = source !== null && opened?.source === source.id ? opened : null;
  const [error, setError] = useState<unknown>(null);
  const [again, setAgain] = useState(0);
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
    if (viewer === null || source === null || !isNamed) return;
    let over = false;
    const mine = new AbortController();
    asking.current = mine;
    setError(null);
    turn.current = turn.current
      .then(async () => {
        if (over) return;
        const found = await latest.current.begin(viewer, mine.signal, setProgress);
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
  }, [viewer, source?.id, again, isNamed]);
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
        <strong class="name">{source?.name ?? "No scan"}</strong>
        {open && viewer && (
          <>
            {given.actions(open, viewer, () => setAgain(again + 1))}
            {!open.flat && <Segmented label="Planes" value={layout.value} options={LAYOUTS} onChange={(next) => (layout.value = next)} />}
          </>
        )}
      </div>
      {source && (
        <WindowControls key={source.id} viewers={[viewer]}>
          {open && tool.value === "move" && <Ruler viewers={[viewer]} />}
        </WindowControls>
      )}
      {open && viewer && (
        <Tools viewer={viewer} drawing={open.drawing} flat={open.flat} labels={labels} choice={{ tool, label, width }} opacity={opacity} />
      )}
      <div class="panes">
        {source ? (
          <Pane
            label={`Drawing on ${source.name}`}
            role="application"
            describedBy="draw-keys"
            hint={gestures(open?.flat ?? false, "draws")}
            onOpen={setViewer}
            onClose={() => setViewer(null)}
          />
        ) : (
          <Empty title="No scan is open">Choose a scan of the cohort on the left, or add one.</Empty>
        )}
        {source && !open && !error && (
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
    </section>
  );
}

/** Save what is not saved, which takes the drawing's state at once: the viewer is closed next. */
async function leave(open: Open | null): Promise<void> {
  await open?.saving.now();
  if (open && !open.saving.isSafe.peek()) {
    const reason = open.saving.error.peek();
    window.alert(`The mask of ${open.name} was not saved: ${reason instanceof Problem ? reason.detail : String(reason)}`);
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

function SaveFailure({ saving, onReopen }: { saving: Saving; onReopen: () => void }) {
  if (saving.state.value !== "failed") return null;
  const error = saving.error.value;
  const isStale = error instanceof Problem && ["mask-stale", "mask-taken"].includes(error.slug);
  return (
    <div class="stage-over stack tight">
      <Rejection error={error} />
      <div class="row">
        <button type="button" class="button small" onClick={() => void saving.send()}>
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
