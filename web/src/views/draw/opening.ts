/** Open a scan to draw on: with its mask, else with that of a model, else with none. */
import { call } from "../../api/client";
import { hospitals, type Model, models, referenceOf } from "../../app/catalogue";
import { correct, type Correctable, type Correction } from "../../app/correcting";
import { readMask, readScan, scansOf, type CohortScan, type ScanPlace } from "../../app/cohorts";
import type { Option } from "../../ui/controls";
import { takeCarried } from "../../viewer/carried";
import type { Drawing } from "../../viewer/drawing";
import { maskAtOwnSize, maskOfPicture, scanOfPicture } from "../../viewer/picture";
import type { Viewer } from "../../viewer/viewer";
import { type Answer, ask, type Progress, type Question } from "../look/asking";
import type { Label } from "./labels";
import { Saving } from "./saving";

/** A scan that is open, and its drawing. */
export interface Open {
  /** What was opened: a view may have gone on to something else. */
  source: string;
  name: string;
  flat: boolean;
  drawing: Drawing;
  saving: Saving;
  /** The model that drew what the drawing began with. */
  drawnBy: string | null;
}

/** What a scan without a mask begins with: a choice of the view. */
export const NOTHING = "nothing";

/** The version that serves comes first: that is the mask which a person would be sent. */
export function beginnings(model: Model, hospital: string): Option<string>[] {
  const name = hospitals.value.find((each) => each.id === hospital)?.name ?? hospital;
  const own = models.value.filter((each) => each.hospital === hospital && each.task === model.task && each.latest !== null);
  return [
    { value: "auto", label: `The mask of the version that serves ${name}` },
    ...(model.personalizations.includes("global") ? [{ value: "global", label: `The mask of ${model.name}` }] : []),
    ...own.map((each) => ({ value: referenceOf(each), label: `The mask of ${referenceOf(each)}` })),
    { value: NOTHING, label: "Nothing" },
  ];
}

/** A model that needs a hospital's masks draws none that could be relied on. */
export const firstBeginning = (model: Model): string => (model.masks === "required" ? NOTHING : "auto");

/** What a view wants, when it is asked. */
interface Wanted {
  model: Model;
  labels: readonly Label[];
  begin: string;
  onMask: (name: string, mask: CohortScan["mask"] | null) => void;
}

/** Show a scan of a cohort, ready to draw. Null where the viewer was closed meanwhile. */
export async function begin(
  viewer: Viewer,
  place: ScanPlace,
  now: () => Wanted,
  signal: AbortSignal,
  onProgress: (progress: Progress | null) => void,
): Promise<Open | null> {
  const { Drawing } = await import("../../viewer/drawing");
  // The list may be older than another person's mask.
  const listed = (await scansOf(place.hospital, place.cohort)).find((each) => each.name === place.name);
  const [shown, mask] = await Promise.all([readScan(place, "display"), listed?.mask ? readMask(place) : null]);
  const { file, flat } = shown;
  await viewer.show(flat ? await scanOfPicture(file) : file, flat);
  if (!viewer.hasScan) return null;
  takeCarried(place.name, viewer);
  now().onMask(place.name, listed?.mask ?? null);
  const answer = mask === null && now().begin !== NOTHING ? await proposal(place, flat, now(), signal, onProgress) : null;
  if (!viewer.hasScan) return null;
  const before = mask !== null ? await read(viewer, mask.file, flat, "mask.nii.gz") : answer && (await drawnOf(viewer, answer.mask, answer.report.label_names, now().labels));
  const drawing = Drawing.begin(viewer, before, mask === null && answer !== null, () => saving.changed());
  let tag = mask?.tag ?? null;
  const path = "/hospitals/{hospital}/cohorts/{cohort}/scans/{name}/mask";
  // Another person's mask is not overwritten, nor deleted.
  const condition = (): Record<string, string> => (tag === null ? {} : { "If-Match": tag });
  const saving = new Saving(() => {
    // A stroke that was undone or erased leaves no mask: an empty one would say that there is no target.
    if (drawing.saysNothing) {
      return async () => {
        if (tag !== null) await call("delete", path, { path: { ...place }, headers: condition() });
        tag = null;
        now().onMask(place.name, null);
      };
    }
    // Both copy the drawing now: the viewer may close before they are done.
    const content = flat ? maskAtOwnSize(file, mask?.file ?? null, drawing.rows()) : drawing.nifti();
    content.catch(() => undefined); // it is awaited, and reported, when its turn comes
    return async () => {
      const { data } = await call("put", path, {
        path: { ...place },
        query: { model: referenceOf(now().model) },
        body: new Blob([await content], { type: "application/octet-stream" }),
        headers: condition(),
      });
      tag = `"${data.sha256}"`;
      now().onMask(place.name, data);
    };
  });
  return { source: sourceOf(place), name: place.name, flat, drawing, saving, drawnBy: answer && answer.model };
}

export const sourceOf = ({ hospital, cohort, name }: ScanPlace) => `${hospital}/${cohort}/${name}`;

/** Show the scan of an answer with its mask, to be corrected: it is sent when the person says so. */
export async function beginCorrection(
  viewer: Viewer,
  answer: Correctable,
  labels: readonly Label[],
  onSent: (correction: Correction) => void,
  seconds: () => number,
): Promise<Open | null> {
  const { Drawing } = await import("../../viewer/drawing");
  const { flat, shown, name, request } = answer;
  await viewer.show(shown, flat);
  if (!viewer.hasScan) return null;
  takeCarried(name, viewer);
  const drawing = Drawing.begin(viewer, await drawnOf(viewer, answer.mask, answer.names, labels), true, () => saving.changed());
  const saving = new Saving(() => {
    const isRight = drawing.isUntouched;
    const mask = isRight ? null : flat ? maskAtOwnSize(answer.mask.file, null, drawing.rows()) : drawing.nifti();
    mask?.catch(() => undefined);
    return async () => onSent(await correct(answer, await mask, seconds()));
  }, true);
  return { source: request, name, flat, drawing, saving, drawnBy: answer.model };
}

/** The model's answer to a scan; null where a person gave it up. */
async function proposal(
  place: ScanPlace,
  flat: boolean,
  { model, begin }: Wanted,
  signal: AbortSignal,
  onProgress: (progress: Progress | null) => void,
): Promise<Answer | null> {
  const isVersion = begin !== "auto" && begin !== "global";
  const question: Question = {
    model: isVersion ? begin : model.name,
    hospital: place.hospital,
    personalization: begin === "global" ? "global" : "auto",
    site: "",
  };
  try {
    onProgress({ words: "Fetching the scan", share: null });
    const { file } = await readScan(place, "stored");
    return await ask({ files: [file], flat }, question, signal, onProgress);
  } catch (error) {
    if (signal.aborted) return null;
    throw error;
  } finally {
    onProgress(null);
  }
}

/** An answer's mask with the values that the task names. */
async function drawnOf(viewer: Viewer, mask: Answer["mask"], names: Readonly<Record<string, number>>, labels: readonly Label[]) {
  const { renamed } = await import("../../viewer/viewer");
  const image = await read(viewer, mask.file, mask.flat, mask.name);
  return renamed(image, names, Object.fromEntries(labels.map(({ name, value }) => [name, value])));
}

const read = async (viewer: Viewer, file: Blob, flat: boolean, name: string) =>
  flat ? await viewer.read(await maskOfPicture(file), "mask.nii") : await viewer.read(file, name);
