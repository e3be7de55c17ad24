/** What the Look view shows. It outlives the view, so that a visit to another loses nothing. */
import { batch, signal } from "@preact/signals";
import { kindOf } from "../../viewer/nifti";
import { scanOfPicture } from "../../viewer/picture";
import { type Answer, ask, type Progress, type Question } from "./asking";

export interface OpenScan {
  name: string;
  file: Blob;
  /** A picture: no sides of a patient, no volume. */
  flat: boolean;
  /** What the viewer draws. */
  shown: Blob | ArrayBuffer;
}

export const scan = signal<OpenScan | null>(null);
export const question = signal<Question>({ model: "", hospital: "", personalization: "auto", site: "" });
export const answer = signal<Answer | null>(null);
/** An earlier answer for the same scan, to compare with. */
export const kept = signal<Answer | null>(null);
export const progress = signal<Progress | null>(null);
export const failure = signal<unknown>(null);

let running: AbortController | null = null;

/** Take a scan that a person chose. */
export async function openFiles(files: readonly File[]): Promise<void> {
  const file = files[0];
  if (file === undefined) return;
  cancel();
  batch(() => {
    failure.value = null;
    answer.value = null;
    kept.value = null;
  });
  try {
    const kind = await kindOf(file);
    if (kind === "nifti") scan.value = { name: file.name, file, flat: false, shown: file };
    else if (kind === "png") scan.value = { name: file.name, file, flat: true, shown: await scanOfPicture(file) };
    else throw new Error(`${file.name}: expected a NIfTI volume or a PNG picture, found another file.`);
  } catch (error) {
    failure.value = error;
  }
}

export async function segment(): Promise<void> {
  const open = scan.value;
  if (open === null) return;
  cancel();
  const mine = new AbortController();
  running = mine;
  failure.value = null;
  try {
    answer.value = await ask(open.file, open.flat, question.value, mine.signal, (found) => {
      if (running === mine) progress.value = found;
    });
  } catch (error) {
    if (!mine.signal.aborted) failure.value = error;
  } finally {
    if (running === mine) {
      running = null;
      progress.value = null;
    }
  }
}

export function cancel(): void {
  running?.abort();
  running = null;
  progress.value = null;
}
