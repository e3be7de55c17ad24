/** A viewer as a component: the canvas, its size, and where the cross-hair is. */
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import type { Viewer } from "./viewer";

export function Pane(given: {
  label: string;
  /** What the canvas is for a screen reader: `application` where keys draw. */
  role?: "img" | "application";
  describedBy?: string;
  /** What the mouse does, below the picture. */
  hint?: string;
  /** Which of two panes it is. */
  name?: string;
  onOpen: (viewer: Viewer) => void;
  onClose?: () => void;
  children?: ComponentChildren;
}) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [place, setPlace] = useState("");
  const [failure, setFailure] = useState<string | null>(null);
  useEffect(() => {
    let opened: Viewer | null = null;
    let over = false;
    void (async () => {
      try {
        const { Viewer } = await import("./viewer");
        if (over) return;
        opened = await Viewer.open(canvas.current!, setPlace);
        if (over) opened.close();
        else given.onOpen(opened);
      } catch {
        const hasWebGL = document.createElement("canvas").getContext("webgl2") !== null;
        setFailure(
          hasWebGL ? "The viewer could not be loaded. Reload the page." : "This browser cannot draw volumes: it needs WebGL 2.",
        );
      }
    })();
    return () => {
      over = true;
      given.onClose?.();
      opened?.close();
    };
    // One viewer for the life of the canvas.
  }, []);
  return (
    <figure class="pane">
      <div class="pane-canvas">
        <canvas ref={canvas} tabIndex={0} aria-label={given.label} role={given.role ?? "img"} aria-describedby={given.describedBy} />
        {failure && <p class="pane-text">{failure}</p>}
        {given.name && (
          <span class="pane-name" aria-hidden="true">
            {given.name}
          </span>
        )}
        {given.children}
      </div>
      <figcaption class="pane-place" aria-live="off">
        <span class="mono">{place || "\u00a0"}</span>
        {given.hint && <span>{given.hint}</span>}
      </figcaption>
    </figure>
  );
}

/** What mouse or fingers do on the picture. `drags`: what a finger does. */
export function gestures(flat: boolean, drags = "cross-hair"): string {
  if (window.matchMedia("(pointer: coarse)").matches) return `Pinch: zoom. Two fingers: ${flat ? "pan" : "slices"}. Drag: ${drags}`;
  return `${flat ? "" : "Wheel: slices. "}Ctrl and wheel: zoom. Right drag: window. Middle drag: pan. ?: keys`;
}
