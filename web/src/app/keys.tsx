/** What the keyboard does, opened by `?` or a button. `docs/how-to/page.md` has the same. */
import { useEffect, useState } from "preact/hooks";
import { Dialog } from "../ui/dialog";

const KEYS: readonly { keys: string; does: string }[] = [
  { keys: "?", does: "Opens this list." },
  { keys: "Tab, Shift+Tab", does: "Go to the next control, and back. The first one skips to the content." },
  { keys: "Escape", does: "Closes a dialog." },
  { keys: "Arrows", does: "On a picture that is drawn on: move the cross-hair by a voxel." },
  { keys: "Page Up, Page Down", does: "Change the slice." },
  { keys: "Space", does: "Draws with the brush at the cross-hair." },
  { keys: "Shift+Arrow", does: "Draws a line." },
  { keys: "B, E", does: "Choose brush and eraser." },
  { keys: "1 to 9", does: "Choose the label." },
  { keys: "[, ]", does: "Make the brush narrower, and wider." },
  { keys: "Ctrl+Z", does: "Takes a stroke back." },
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
        <Dialog title="Keyboard" onClose={() => setOpen(false)}>
          <dl class="glossary">
            {KEYS.map(({ keys, does }) => (
              <div key={keys}>
                <dt>{keys}</dt>
                <dd>{does}</dd>
              </div>
            ))}
          </dl>
        </Dialog>
      )}
    </>
  );
}

/** Whether a person writes there. */
const types = (target: EventTarget | null) =>
  target instanceof HTMLElement && target.matches("input:not([type=checkbox]):not([type=radio]):not([type=range]), textarea, select");
