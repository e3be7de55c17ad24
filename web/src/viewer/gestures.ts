/** What mouse, wheel and keys do on the canvas of a viewer, where NiiVue does something else than OHIF and Slicer. */
import { followFingers } from "./fingers";
import type { Direction } from "./layouts";
import type { Viewer } from "./viewer";

const WHEEL_ZOOM = 1.15;

export const STEPS: Readonly<Record<string, readonly [Direction, 1 | -1]>> = {
  ArrowRight: ["right", 1],
  ArrowLeft: ["right", -1],
  ArrowUp: ["up", 1],
  ArrowDown: ["up", -1],
  PageUp: ["next", 1],
  PageDown: ["next", -1],
};

/** Must be called before NiiVue listens to the canvas. */
export function follow(viewer: Viewer, canvas: HTMLCanvasElement): void {
  const { niivue } = viewer;
  // Its keys are those of vi.
  niivue.keyDownListener = () => undefined;
  canvas.addEventListener("keydown", (event) => {
    const step = STEPS[event.key];
    if (step === undefined || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
    event.preventDefault();
    viewer.move(...step);
  });
  niivue.windowingHandler = (x, y) => {
    const { uiData } = niivue;
    viewer.dragWindow(x - uiData.windowX, uiData.windowY - y);
    [uiData.windowX, uiData.windowY] = [x, y];
  };
  followFingers(viewer, canvas);
  // It takes a double click, and a finger that rests, as a wish for its own window.
  niivue.resetBriCon = () => undefined;
  canvas.addEventListener("dblclick", (event) => viewer.enlarge([event.offsetX, event.offsetY]));
  canvas.addEventListener(
    "wheel",
    (event) => {
      // Browsers send a pinch of a touch pad as a wheel with Ctrl.
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      event.stopImmediatePropagation();
      viewer.zoom(viewer.zoomed.peek() * (event.deltaY < 0 ? WHEEL_ZOOM : 1 / WHEEL_ZOOM), [event.offsetX, event.offsetY]);
    },
    { capture: true, passive: false },
  );
}
