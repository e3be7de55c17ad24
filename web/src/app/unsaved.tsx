/** Work of the present view that would be lost with it: the strokes of a mask that are not saved. */
import { type ReadonlySignal, signal } from "@preact/signals";
import { Dialog } from "../ui/dialog";
import { Rejection } from "../ui/notice";

export interface Work {
  readonly isSafe: ReadonlySignal<boolean>;
  readonly error: ReadonlySignal<unknown>;
  /** Save at once what is not saved. It never throws. */
  now(): Promise<void>;
  drop(): void;
}

export const work = signal<Work | null>(null);
/** What a person wanted to do, and what would lose the work. */
const wanted = signal<(() => void) | null>(null);

/** Save the work. Returns whether nothing would be lost. */
export async function saved(): Promise<boolean> {
  const found = work.peek();
  await found?.now();
  return found?.isSafe.peek() ?? true;
}

/** Save the work, then `go`. Where it cannot be saved, the person decides. */
export async function leave(go: () => void): Promise<void> {
  if (await saved()) go();
  else wanted.value = go;
}

/** Save what could not be saved before, and go where the person wanted to go then. */
export async function retry(): Promise<void> {
  const go = wanted.peek() ?? (() => undefined);
  wanted.value = null;
  await leave(go);
}

export function Leaving() {
  const go = wanted.value;
  if (go === null) return null;
  return (
    <Dialog title="The mask is not saved" onClose={() => (wanted.value = null)}>
      <div class="stack">
        <Rejection error={work.value?.error.value} />
        <p>Go back and try again, or drop the strokes that are not saved.</p>
        <div class="row">
          <button
            type="button"
            class="button danger"
            onClick={() => {
              work.peek()?.drop();
              wanted.value = null;
              go();
            }}
          >
            Drop the strokes
          </button>
        </div>
      </div>
    </Dialog>
  );
}
