/** Corrections of answers: what a person says is right, or draws in its place. */
import { signal } from "@preact/signals";
import { fill, Problem, type Schema, send } from "../api/client";

export type Correction = Schema<"CorrectionView">;

/** An answer that is open in a view, with its scan: Draw takes it up from Look. */
export interface Correctable {
  request: string;
  hospital: string;
  /** `name@version`, which answered. */
  model: string;
  /** Of the scan. */
  name: string;
  files: readonly Blob[];
  flat: boolean;
  /** What the viewer draws. */
  shown: Blob | ArrayBuffer;
  /** The answer's mask, and its values by name. */
  mask: { file: Blob; name: string; flat: boolean };
  names: Readonly<Record<string, number>>;
}

export const correctable = signal<Correctable | null>(null);

/**
 * Say that an answer is right (`mask` null), or how it should be. Throws Problem.
 *
 * A mask is checked against its scan, which is sent where the service does not have it any more; without files the
 * rejection `scan-gone` stands.
 */
export async function correct(
  answer: { hospital: string; request: string; files?: readonly Blob[] },
  mask: Blob | null,
  seconds?: number,
): Promise<Correction> {
  const { hospital, request, files = [] } = answer;
  const body = (scan: readonly Blob[]) => {
    const form = new FormData();
    if (mask === null) form.set("accepted", "true");
    if (seconds !== undefined) form.set("seconds", String(Math.round(seconds)));
    if (mask !== null) form.set("mask", mask, "mask");
    for (const file of scan) form.append("scan", file, "scan");
    return form;
  };
  const url = fill("/hospitals/{hospital}/corrections/{request}", { hospital, request });
  const put = async (scan: readonly Blob[]) => (await (await send("put", url, { body: body(scan) })).json()) as Correction;
  try {
    return await put([]);
  } catch (error) {
    if (!(error instanceof Problem && error.slug === "scan-gone" && files.length > 0)) throw error;
    return await put(files);
  }
}

/** What became of a correction, in a sentence. */
export const correctionWords = ({ accepted, actor }: Pick<Correction, "accepted" | "actor">): string =>
  `${accepted ? "Accepted" : "Corrected"} by ${actor}`;

/** A pause that is longer is no work. */
const LONGEST_PAUSE_MS = 60_000;

/** Counts the seconds in which a person works on the page. */
export class Worked {
  private total = 0;
  private last = performance.now();

  constructor() {
    for (const kind of EVENTS) window.addEventListener(kind, this.note, { capture: true, passive: true });
  }

  private readonly note = () => {
    const now = performance.now();
    this.total += Math.min(now - this.last, LONGEST_PAUSE_MS);
    this.last = now;
  };

  get seconds(): number {
    this.note();
    return this.total / 1000;
  }

  stop(): void {
    for (const kind of EVENTS) window.removeEventListener(kind, this.note, { capture: true });
  }
}

const EVENTS = ["pointermove", "pointerdown", "keydown", "wheel"] as const;
