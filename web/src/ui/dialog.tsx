/** A modal dialog: Escape closes it, and the focus returns to where it was. */
import type { ComponentChildren } from "preact";
import { useEffect, useId, useRef } from "preact/hooks";

export function Dialog(given: { title: string; onClose: () => void; children: ComponentChildren }) {
  const element = useRef<HTMLDialogElement>(null);
  const heading = useId();
  useEffect(() => element.current?.showModal(), []);
  return (
    <dialog ref={element} aria-labelledby={heading} onClose={given.onClose}>
      <div class="dialog-head">
        <h2 id={heading}>{given.title}</h2>
        <button type="button" class="button quiet small" onClick={() => element.current?.close()}>
          Close
        </button>
      </div>
      {given.children}
    </dialog>
  );
}
