/** What the keyboard does on a picture that is drawn on. */
import type { Signal } from "@preact/signals";
import type { Drawing, Tool } from "../../viewer/drawing";
import { STEPS } from "../../viewer/gestures";
import type { Viewer } from "../../viewer/viewer";

export interface Choice {
  tool: Signal<Tool>;
  /** The index of the label. */
  label: Signal<number>;
  /** Of the brush, in millimetres or pixels. */
  width: Signal<number>;
}

/** Widths of the brush, by the finest of them. */
export const WIDEST = 61;

export const TOOLS: readonly { value: Tool; label: string; key?: string }[] = [
  { value: "move", label: "Point", key: "p" },
  { value: "brush", label: "Brush", key: "b" },
  { value: "outline", label: "Outline", key: "o" },
  { value: "rectangle", label: "Rectangle" },
  { value: "ellipse", label: "Ellipse" },
  { value: "fill", label: "Fill", key: "f" },
  { value: "eraser", label: "Eraser", key: "e" },
];

/** Do what a key says. Returns whether it says something. */
export function press(event: KeyboardEvent, viewer: Viewer, drawing: Drawing, choice: Choice, labels: number): boolean {
  const key = event.key.toLowerCase();
  if (event.ctrlKey || event.metaKey) {
    if (key === "y" || (key === "z" && event.shiftKey)) drawing.redo();
    else if (key === "z") drawing.undo();
    else return false;
    return true;
  }
  if (!(event.target instanceof HTMLCanvasElement) || event.altKey) return false;
  const step = STEPS[event.key];
  if (step) {
    viewer.move(...step);
    if (event.shiftKey && step[0] !== "next") drawing.stroke();
    return true;
  }
  const tool = TOOLS.find((each) => each.key === key);
  const { finest } = drawing;
  const widen = (more: 1 | -1) => {
    choice.width.value = Math.min(WIDEST * finest, Math.max(finest, choice.width.value + 2 * more * finest));
  };
  if (key === " ") choice.tool.value === "fill" ? drawing.fillAt() : drawing.stroke();
  else if (tool) choice.tool.value = tool.value;
  else if (key === "[") widen(-1);
  else if (key === "]") widen(1);
  else if (/^[1-9]$/.test(key) && Number(key) <= labels) choice.label.value = Number(key) - 1;
  else return false;
  return true;
}
