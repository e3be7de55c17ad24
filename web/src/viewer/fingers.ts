/** What fingers do on the canvas of a viewer, where NiiVue does something else: what mouse and wheel do. */
import type { Viewer } from "./viewer";

/** Pixels that two fingers move together for a slice, and before it is clear whether they pinch or move. */
const SLICE = 14;
const UNCLEAR = 10;

type Place = readonly [x: number, y: number];

/** Two fingers: the middle between them, and how far apart they are. */
export interface Pair {
  middle: Place;
  apart: number;
}

/** Whether two fingers pinch or move together; null while it is not clear. */
export function wishOf(from: Pair, now: Pair): "pinch" | "move" | null {
  const spread = Math.abs(now.apart - from.apart);
  const way = Math.hypot(now.middle[0] - from.middle[0], now.middle[1] - from.middle[1]);
  if (Math.max(spread, way) < UNCLEAR) return null;
  return spread > way ? "pinch" : "move";
}

function pairOf({ touches: [one, other] }: TouchEvent): Pair {
  return {
    middle: [(one!.clientX + other!.clientX) / 2, (one!.clientY + other!.clientY) / 2],
    apart: Math.hypot(one!.clientX - other!.clientX, one!.clientY - other!.clientY),
  };
}

/** Must be called before NiiVue listens to the canvas. */
export function followFingers(viewer: Viewer, canvas: HTMLCanvasElement): void {
  let two: { from: Pair; zoom: number; wish: ReturnType<typeof wishOf>; slices: number } | null = null;
  const at = ([x, y]: Place) => ({ clientX: x, clientY: y, bubbles: true, cancelable: true });
  const mouse = (type: string, place: Place, button: 0 | 1) => canvas.dispatchEvent(new MouseEvent(type, { ...at(place), button }));
  const placeOf = ({ clientX, clientY }: Touch): Place => [clientX, clientY];

  const act = (now: Pair) => {
    if (two === null) return;
    const before = two.wish;
    two.wish ??= wishOf(two.from, now);
    if (two.wish === "pinch") {
      const { left, top } = canvas.getBoundingClientRect();
      viewer.zoom((two.zoom * now.apart) / Math.max(two.from.apart, 1), [two.from.middle[0] - left, two.from.middle[1] - top]);
    } else if (two.wish === "move" && viewer.isPicture) {
      // As with the middle button.
      if (before === null) mouse("mousedown", two.from.middle, 1);
      mouse("mousemove", now.middle, 1);
    } else if (two.wish === "move") {
      const slices = Math.trunc((now.middle[1] - two.from.middle[1]) / SLICE);
      const deltaY = Math.sign(slices - two.slices);
      for (; two.slices !== slices; two.slices += deltaY) canvas.dispatchEvent(new WheelEvent("wheel", { ...at(two.from.middle), deltaY }));
    }
  };

  /** Whether the event is not NiiVue's. */
  const handlers: Record<string, (event: TouchEvent) => boolean> = {
    touchstart: (event) => {
      if (event.touches.length === 1 && two === null) {
        if (viewer.isMeasuring) mouse("mousedown", placeOf(event.touches[0]!), 0);
        return viewer.isMeasuring;
      }
      if (two === null) {
        viewer.dropDrag();
        viewer.niivue.touchEndListener(event);
        two = { from: pairOf(event), zoom: viewer.zoomed.peek(), wish: null, slices: 0 };
      }
      return true;
    },
    touchmove: (event) => {
      if (two !== null && event.touches.length >= 2) act(pairOf(event));
      else if (two === null && viewer.isMeasuring) mouse("mousemove", placeOf(event.touches[0]!), 0);
      return two !== null || viewer.isMeasuring;
    },
    touchend: (event) => {
      const isOver = event.touches.length === 0;
      if (two !== null) {
        if (event.touches.length === 1 && two.wish === "move" && viewer.isPicture) mouse("mouseup", two.from.middle, 1);
        // A finger that stays does nothing.
        if (isOver) two = null;
        return true;
      }
      if (viewer.isMeasuring) mouse("mouseup", placeOf(event.changedTouches[0]!), 0);
      return viewer.isMeasuring;
    },
  };
  handlers.touchcancel = handlers.touchend!;
  for (const [name, handle] of Object.entries(handlers)) {
    const listen = (event: Event) => {
      if (!handle(event as TouchEvent)) return;
      event.preventDefault();
      event.stopImmediatePropagation();
    };
    canvas.addEventListener(name, listen, { capture: true, passive: false });
  }
}
