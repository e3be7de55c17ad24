/** What the Look view shows. It outlives the view, so that a visit to another loses nothing. */
import { batch, signal } from "@preact/signals";
import { send } from "../../api/client";
import { isPicture, readMask, readScan, type CohortScan, type ScanPlace } from "../../app/cohorts";
import { isReadAlike, kindOf } from "../../viewer/nifti";
import { scanOfPicture } from "../../viewer/picture";
import { type Answer, ask, askClass, attach, type Classified, type Progress, type Question } from "./asking";

export interface OpenScan {
  name: string;
  /** One file, those of a DICOM series, or a header and its voxels. */
  files: readonly Blob[];
  /** A picture: no sides of a patient, no volume. */
  flat: boolean;
  /** Whether its mask can be a DICOM SEG. */
  isDicom: boolean;
  /** What the viewer draws. */
  shown: Blob | ArrayBuffer;
  /** The mask that a person drew on a scan of a cohort. */
  drawn: { file: Blob; values: readonly number[] } | null;
}

export const scan = signal<OpenScan | null>(null);
export const question = signal<Question>({ model: "", hospital: "", personalization: "auto", site: "" });
/** Whether the model is being chosen: it is empty until then. */
export const isChoosing = signal(false);
export const answer = signal<Answer | null>(null);
/** The answer of a classifier; `answer` is a segmenter's. */
export const classified = signal<Classified | null>(null);
/** An earlier answer for the same scan, to compare with. */
export const kept = signal<Answer | null>(null);
export const progress = signal<Progress | null>(null);
export const failure = signal<unknown>(null);

let running: AbortController | null = null;

/** Take a scan that a person chose: one file, the files of a DICOM series, or a file for each channel. */
export async function openFiles(files: readonly File[]): Promise<void> {
  const first = files[0];
  if (first === undefined) return;
  const name = files.length === 1 ? first.name : `${first.name} and ${files.length - 1} more`;
  await opening(async (signal) => await opened(name, files, signal));
}

/** Take a scan of a cohort, with its mask. */
export async function openStored(place: ScanPlace, mask: CohortScan["mask"]): Promise<void> {
  await opening(async (signal) => {
    const fetched = (share: number | null) => {
      if (!signal.aborted) progress.value = { words: "Fetching the scan", share };
    };
    fetched(null);
    const { file } = await readScan(place, "stored", fetched);
    const found = await opened(place.name, [file], signal);
    return { ...found, drawn: mask ? { file: (await readMask(place)).file, values: mask.values } : null };
  });
}

/** One scan after the other: what is opened later wins. */
async function opening(open: (signal: AbortSignal) => Promise<OpenScan>): Promise<void> {
  cancel();
  batch(() => {
    failure.value = null;
    answer.value = null;
    classified.value = null;
    kept.value = null;
  });
  await working(async (signal) => {
    const found = await open(signal);
    signal.throwIfAborted();
    scan.value = found;
  });
}

/** A volume or picture that the viewer reads as the service does is shown at once; the service reads others. */
export async function opened(
  name: string,
  files: readonly Blob[],
  signal: AbortSignal,
  onProgress: (step: Progress) => void = (step) => (progress.value = step),
): Promise<OpenScan> {
  const each = await Promise.all(files.map(kindOf));
  const kinds = new Set(each);
  // A header (.hdr) and its voxels (.img), which by themselves are of no kind.
  const pair = files.length === 2 && each.filter((found) => found === "header").length === 1;
  const kind = pair ? "header" : kinds.has("dicom") ? "dicom" : [...kinds][0]!;
  // Several NIfTI volumes are the channels of one scan.
  const channels = files.length > 1 && kinds.size === 1 && kind === "nifti";
  if (kind === "unknown" || (files.length > 1 && kind !== "dicom" && !channels && !pair)) {
    const other = files[each.indexOf("unknown")];
    throw new Error(
      `${other instanceof File ? other.name : name}: expected a NIfTI, NRRD or MetaImage volume, ANALYZE (.hdr with its .img), a PNG or TIFF picture, or DICOM (a file, a .zip of a series, or its files), or a NIfTI volume for each channel, ` +
        "found another file.",
    );
  }
  const file = files[0]!;
  const common = { name, files, drawn: null, isDicom: kind === "dicom" || kind === "zip" };
  if (kind === "nifti" && !channels && (await isReadAlike(file))) return { ...common, flat: false, shown: file };
  if (kind === "png") return { ...common, flat: true, shown: await scanOfPicture(file) };
  const body = new FormData();
  attach(body, files);
  const onSent = (share: number) => {
    onProgress(share < 1 ? { words: "Sending the scan", share } : { words: "Reading the scan", share: null });
  };
  const read = await send("post", "display", { body, signal, onSent });
  const shown = await read.blob();
  return isPicture(read)
    ? { ...common, flat: true, shown: await scanOfPicture(shown) }
    : { ...common, flat: false, shown };
}

/** Ask the chosen model about the open scan: for a mask, or for classes. */
export async function answerNow(classifies: boolean): Promise<void> {
  const open = scan.value;
  if (open === null) return;
  cancel();
  failure.value = null;
  await working(async (signal) => {
    const onProgress = (step: Progress) => {
      if (!signal.aborted) progress.value = step;
    };
    if (classifies) {
      const found = await askClass(open, question.value, signal, onProgress);
      signal.throwIfAborted();
      batch(() => {
        classified.value = found;
        answer.value = null;
      });
    } else {
      const found = await ask(open, question.value, signal, onProgress);
      signal.throwIfAborted();
      batch(() => {
        answer.value = found;
        classified.value = null;
      });
    }
  });
}

async function working(work: (signal: AbortSignal) => Promise<void>): Promise<void> {
  const mine = new AbortController();
  running = mine;
  try {
    await work(mine.signal);
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
