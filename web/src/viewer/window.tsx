/** Which intensities are black and white, how large the planes are, outlines, a ruler, and the whole screen. */
import { signal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { Range, Select, Toggle } from "../ui/controls";
import type { Viewer, Window } from "./viewer";

/** Level and width in Hounsfield units, as radiologists name them. */
const CT: Readonly<Record<string, readonly [level: number, width: number]>> = {
  brain: [40, 80],
  abdomen: [50, 400],
  mediastinum: [50, 350],
  lung: [-600, 1500],
  bone: [400, 1800],
};
/** Air: a scan with less is taken for CT. */
const AIR = -500;
/** As `viewer` has it, which is not loaded for a number. */
const MOST_ZOOM = 8;

type Preset = "usual" | "whole" | "own" | keyof typeof CT;

/** Whether masks are shown as outlines: in each view alike. */
export const isOutlined = signal(false);

/** `children`: what a view adds. */
export function WindowControls({ viewers, children }: { viewers: readonly (Viewer | null)[]; children?: ComponentChildren }) {
  const open = viewers.filter((each) => each !== null);
  const first = open[0];
  const found = first?.window.value ?? null;
  const [preset, setPreset] = useState<Preset>("usual");
  if (first === undefined || found === null) return null;
  const show = (window?: readonly [number, number]) => open.forEach((each) => each.setWindow(window));
  const choose = (next: Preset) => {
    setPreset(next);
    if (next === "usual") show();
    else if (next === "whole") show([found.least, found.most]);
    else if (next !== "own") show(boundsOf(CT[next]!));
  };
  const [level, width] = [(found.low + found.high) / 2, found.high - found.low];
  const own = (nextLevel: number, nextWidth: number) => {
    if (!Number.isFinite(nextLevel) || !(nextWidth > 0)) return;
    setPreset("own");
    show([nextLevel - nextWidth / 2, nextLevel + nextWidth / 2]);
  };
  const names = found.least < AIR ? Object.keys(CT) : [];
  const labels: Record<string, string> = { usual: "As opened", whole: "All intensities", own: "Own" };
  return (
    <div class="stage-tools" role="group" aria-label="View">
      <Select
        label="Window"
        value={shownAs(preset, found)}
        options={["usual", "whole", ...names, "own"].map((value) => ({
          value,
          label: labels[value] ?? `${value.charAt(0).toUpperCase()}${value.slice(1)} (CT)`,
        }))}
        onChange={choose}
      />
      <NumberField label="Level" value={level} onChange={(next) => own(next, width)} />
      <NumberField label="Width" value={width} onChange={(next) => own(level, next)} />
      <Range
        label="Zoom"
        min={1}
        max={MOST_ZOOM}
        step={0.25}
        value={first.zoomed.value}
        onInput={(next) => open.forEach((each) => each.zoom(next))}
      />
      <Toggle label="Outlines" value={isOutlined.value} onChange={(next) => (isOutlined.value = next)} />
      {children}
      {document.fullscreenEnabled && <WholeScreen />}
    </div>
  );
}

/** A drag on the picture makes the window a person's own. */
function shownAs(preset: Preset, { low, high, usual, least, most }: Window): Preset {
  const [from, to] = preset === "usual" ? usual : preset === "whole" ? [least, most] : preset === "own" ? [low, high] : boundsOf(CT[preset]!);
  return from === low && to === high ? preset : "own";
}

const boundsOf = ([level, width]: readonly [number, number]) => [level - width / 2, level + width / 2] as const;

/** Measures lengths in place of moving the cross-hair. */
export function Ruler({ viewers }: { viewers: readonly (Viewer | null)[] }) {
  const [isOn, setOn] = useState(false);
  useEffect(() => viewers.forEach((each) => each?.ruler(isOn)), [isOn, ...viewers]);
  return <Toggle label="Ruler" value={isOn} onChange={setOn} />;
}

function NumberField(given: { label: string; value: number; onChange: (value: number) => void }) {
  return (
    <label class="check">
      {given.label}
      <input
        type="number"
        step="any"
        value={Number(given.value.toPrecision(5))}
        onChange={(event) => given.onChange(event.currentTarget.valueAsNumber)}
      />
    </label>
  );
}

/** The stage alone, or the page again. */
function WholeScreen() {
  const [isWhole, setWhole] = useState(document.fullscreenElement !== null);
  useEffect(() => {
    const note = () => setWhole(document.fullscreenElement !== null);
    document.addEventListener("fullscreenchange", note);
    return () => document.removeEventListener("fullscreenchange", note);
  }, []);
  const turn = async (button: HTMLElement) => {
    if (isWhole) await document.exitFullscreen();
    else await button.closest(".stage")?.requestFullscreen();
  };
  return (
    <button type="button" class="button small" onClick={(event) => void turn(event.currentTarget)}>
      {isWhole ? "Leave full screen" : "Full screen"}
    </button>
  );
}
