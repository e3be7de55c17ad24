/** What the keyboard does, opened by `?` or a button. `docs/how-to/page.md` has the same. */
import { useEffect, useState } from "preact/hooks";
import { type Definition, Definitions } from "../ui/definitions";
import { address, place } from "./router";
import { beginTour } from "./tour";

const KEYS: readonly Definition[] = [
  { word: "?", meaning: "Opens this list." },
  { word: "Tab, Shift+Tab", meaning: "Go to the next control, and back. The first one skips to the content." },
  { word: "Escape", meaning: "Closes a dialog." },
  { word: "Arrows", meaning: "On a picture: move the cross-hair by a voxel." },
  { word: "Page Up, Page Down", meaning: "Change the slice, as the wheel does." },
  { word: "Ctrl and wheel", meaning: "Zooms where the mouse is." },
  { word: "Right drag", meaning: "Changes level and width." },
  { word: "Middle drag, Shift and drag", meaning: "Pans." },
  { word: "Double click", meaning: "Enlarges one of several planes, and shows all again; in Draw with Point." },
  { word: "Space", meaning: "Draws at the cross-hair with the chosen tool." },
  { word: "Shift+Arrow", meaning: "Draws a line." },
  { word: "P, B, O, F, E", meaning: "Choose Point, Brush, Outline, Fill and Eraser." },
  { word: "1 to 9", meaning: "Choose the label." },
  { word: "[, ]", meaning: "Make the brush narrower, and wider." },
  { word: "Ctrl+Z", meaning: "Takes a stroke back." },
  { word: "Ctrl+Y", meaning: "Does it again." },
];

export function Keys() {
  const [isOpen, setOpen] = useState(false);
  useEffect(() => {
    const press = (event: KeyboardEvent) => {
      if (event.key !== "?" || event.ctrlKey || event.metaKey || event.altKey || types(event.target)) return;
      event.preventDefault();
      setOpen(true);
    };
    window.addEventListener("keydown", press);
    return () => window.removeEventListener("keydown", press);
  }, []);
  return (
    <>
      <button type="button" class="button quiet small" aria-label="Keyboard" title="Keyboard (?)" onClick={() => setOpen(true)}>
        ?
      </button>
      {isOpen && (
        <Definitions title="Keyboard" entries={KEYS} onClose={() => setOpen(false)}>
          <button
            type="button"
            class="button small"
            onClick={() => {
              setOpen(false);
              if (place.peek().view !== "look") location.hash = address("look");
              beginTour();
            }}
          >
            Take the tour
          </button>
        </Definitions>
      )}
    </>
  );
}

/** Whether a person writes there. */
const types = (target: EventTarget | null) =>
  target instanceof HTMLElement && target.matches("input:not([type=checkbox]):not([type=radio]):not([type=range]), textarea, select");
