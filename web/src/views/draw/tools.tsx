/** The tools: what is drawn, with what, where, and back again. */
import { signal, type Signal } from "@preact/signals";
import { Range, Segmented, Toggle } from "../../ui/controls";
import type { Drawing } from "../../viewer/drawing";
import { css, labelColour } from "../../viewer/palette";
import type { Viewer } from "../../viewer/viewer";
import { type Choice, TOOLS, WIDEST } from "./keys";
import type { Label } from "./labels";

/** What a stroke may change, of one scan after the other. */
export const locked = signal<ReadonlySet<number>>(new Set());
/** The intensities on which is drawn; null: all. */
export const only = signal<readonly [number, number] | null>(null);

export function Tools(given: {
  viewer: Viewer;
  drawing: Drawing;
  flat: boolean;
  labels: readonly Label[];
  choice: Choice;
  opacity: Signal<number>;
}) {
  const { viewer, drawing, flat, labels, choice, opacity } = given;
  const { tool, label, width } = choice;
  const { finest } = drawing;
  const isRound = tool.value === "brush" || tool.value === "eraser";
  const unit = flat ? "px" : "mm";
  return (
    <div class="stage-tools" role="toolbar" aria-label="Drawing tools">
      <Segmented label="Tool" value={tool.value} options={TOOLS} onChange={(next) => (tool.value = next)} />
      <Labels labels={labels} chosen={label} />
      <div class="row tight">
        <button type="button" class="button small" disabled={drawing.undoable.value === 0} onClick={() => drawing.undo()}>
          Undo
        </button>
        <button type="button" class="button small" disabled={drawing.redoable.value === 0} onClick={() => drawing.redo()}>
          Redo
        </button>
      </div>
      {isRound && (
        <Range
          label={`Width ${Number(width.value.toPrecision(3))} ${unit}`}
          min={finest}
          max={WIDEST * finest}
          step={finest}
          value={width.value}
          onInput={(next) => (width.value = next)}
        />
      )}
      <div class="row tight">
        {!flat && (
          <button type="button" class="button small" title="The chosen label, in the plane that is shown" onClick={() => drawing.fillBetween()}>
            Fill between slices
          </button>
        )}
        <button type="button" class="button small" title="The chosen label, in the plane that is shown" onClick={() => drawing.smooth()}>
          Smooth
        </button>
      </div>
      <Threshold viewer={viewer} />
      <Range label="Mask" value={opacity.value} onInput={(next) => (opacity.value = next)} />
      {drawing.said.value && (
        <span class="chip warn" role="status">
          {drawing.said.value}
        </span>
      )}
    </div>
  );
}

/** The labels, each with its lock. */
function Labels({ labels, chosen }: { labels: readonly Label[]; chosen: Signal<number> }) {
  const lock = (value: number) => {
    const next = new Set(locked.value);
    if (!next.delete(value)) next.add(value);
    locked.value = next;
  };
  return (
    <div class="segmented" role="group" aria-label="Label">
      {labels.map(({ value, name }, i) => (
        <span key={value} class="label-choice">
          <button type="button" aria-pressed={i === chosen.value} onClick={() => (chosen.value = i)}>
            <span class="swatch" style={{ background: css(labelColour(i + 1)) }} />
            {name}
          </button>
          <button
            type="button"
            class="lock"
            aria-pressed={locked.value.has(value)}
            aria-label={`Lock ${name}`}
            title={locked.value.has(value) ? `${name} is locked: no stroke changes it` : `Lock ${name}`}
            onClick={() => lock(value)}
          >
            <Padlock isClosed={locked.value.has(value)} />
          </button>
        </span>
      ))}
    </div>
  );
}

function Padlock({ isClosed }: { isClosed: boolean }) {
  return (
    <svg width="13" height="15" viewBox="0 0 13 15" aria-hidden="true" fill="none" stroke="currentColor" stroke-width="1.6">
      <rect x="1" y="6.5" width="11" height="7.5" rx="1.5" fill={isClosed ? "currentColor" : "none"} />
      <path d={isClosed ? "M3.5 6.5V4a3 3 0 0 1 6 0v2.5" : "M3.5 6.5V4a3 3 0 0 1 5.8-1"} />
    </svg>
  );
}

/** Draw where the scan has some intensities alone: from what is shown as grey, at first. */
function Threshold({ viewer }: { viewer: Viewer }) {
  const shown = viewer.window.value;
  const found = only.value;
  if (shown === null) return null;
  const field = (name: string, at: 0 | 1) => (
    <input
      type="number"
      step="any"
      aria-label={`Intensities ${name}`}
      value={Number(found![at].toPrecision(5))}
      onChange={({ currentTarget: { valueAsNumber: value } }) => {
        if (Number.isFinite(value)) only.value = at === 0 ? [value, found![1]] : [found![0], value];
      }}
    />
  );
  return (
    <span class="row tight">
      <Toggle
        label="Only intensities"
        value={found !== null}
        onChange={(isOn) => (only.value = isOn ? [(shown.low + shown.high) / 2, Math.max(shown.most, shown.high)] : null)}
      />
      {found && (
        <>
          {field("from", 0)} to {field("to", 1)}
        </>
      )}
    </span>
  );
}
