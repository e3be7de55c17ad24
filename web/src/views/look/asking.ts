/** Ask the service for a mask, and wait for it where a job makes it. */
import { call, Problem, send, type Schema } from "../../api/client";

export type Report = Schema<"SegmentationReport">;
export type Personalization = "auto" | "global" | "member" | "hospital" | "scan";

export interface Question {
  /** Reference of the model, as a request names it. */
  model: string;
  hospital: string;
  personalization: Personalization;
  site: string;
}

/** One answer: the mask as a file that the viewer reads, and the report. */
export interface Answer {
  question: Question;
  mask: { file: Blob; name: string; flat: boolean };
  report: Report;
  /** `name@version`, and which model inside it. */
  model: string;
  personalization: string;
}

export interface Progress {
  words: string;
  /** 0 to 1; null where it is not known. */
  share: number | null;
}

const WAIT_SECONDS = 20;
const POLL_MS = 700;

/** The form's fields: those that are empty are left out. */
export function fields(question: Question): Record<string, string> {
  const { model, hospital, personalization, site } = question;
  const found = { model, hospital, personalization, site: personalization === "member" ? site : "" };
  return Object.fromEntries(Object.entries(found).filter(([, value]) => value !== ""));
}

/** What of a scan is sent: one file, or those of a DICOM series. */
interface Sent {
  files: readonly Blob[];
  flat: boolean;
}

/** Segment a scan. Throws Problem, and AbortError when `signal` ended it. */
export async function ask(
  scan: Sent,
  question: Question,
  signal: AbortSignal,
  onProgress: (progress: Progress) => void,
): Promise<Answer> {
  onProgress({ words: "Sending the scan", share: 0 });
  const sent = (share: number) =>
    onProgress(share < 1 ? { words: "Sending the scan", share } : { words: "The model is working", share: null });
  const { flat } = scan;
  const request = async (output: string) => await posted(scan, { ...fields(question), output }, signal, sent, onProgress);
  if (!flat) {
    const answer = await request("multipart");
    const parts = await answer.formData();
    const report = JSON.parse(String(parts.get("params"))) as Report;
    return build(question, answer, report, { file: parts.get("image") as File, name: "mask.nrrd", flat });
  }
  // A picture's mask has no position, and so no NRRD: two requests.
  const mask = await request("png");
  const report = (await (await request("json")).json()) as Report;
  return build(question, mask, report, { file: await mask.blob(), name: "mask.png", flat });
}

const maps = new WeakMap<Answer, Promise<Blob>>();

/** The uncertainty of each voxel of an answer, in percent; asked once, when it is first shown. */
export function uncertaintyOf(scan: Sent, answer: Answer): Promise<Blob> {
  let found = maps.get(answer);
  if (found === undefined) {
    const values = { ...fields(answer.question), voxels: "uncertainty", output: answer.mask.flat ? "png" : "nifti" };
    const forever = new AbortController().signal;
    found = posted(scan, values, forever, () => undefined, () => undefined).then((sent) => sent.blob());
    found.catch(() => maps.delete(answer));
    maps.set(answer, found);
  }
  return found;
}

function build(question: Question, answer: Response, report: Report, mask: Answer["mask"]): Answer {
  const model = answer.headers.get("Locum-Model") ?? report.receipt.model.name;
  return { question, mask, report, model, personalization: answer.headers.get("Locum-Personalization") ?? "" };
}

async function posted(
  scan: Sent,
  values: Record<string, string>,
  signal: AbortSignal,
  onSent: (share: number) => void,
  onProgress: (progress: Progress) => void,
): Promise<Response> {
  const body = new FormData();
  // Text first: the service checks it before the scan arrives.
  for (const [name, value] of Object.entries(values)) body.set(name, value);
  for (const file of scan.files) body.append("scan", file, "scan");
  const headers = { Prefer: `wait=${WAIT_SECONDS}` };
  const onReceived = (share: number) => onProgress({ words: "Receiving the mask", share });
  const answer = await send("post", "segment", { body, signal, onSent, onReceived, headers });
  if (answer.status !== 202) return answer;
  const job = ((await answer.json()) as Schema<"JobView">).id;
  try {
    return await result(job, signal, onProgress, onReceived);
  } catch (error) {
    // The page asked for it, and so it ends it.
    if (signal.aborted) void call("delete", "/jobs/{job}", { path: { job } }).catch(() => undefined);
    throw error;
  }
}

async function result(
  job: string,
  signal: AbortSignal,
  onProgress: (progress: Progress) => void,
  onReceived: (share: number) => void,
): Promise<Response> {
  for (;;) {
    const { data } = await call("get", "/jobs/{job}", { path: { job }, signal });
    if (["succeeded", "fell_back"].includes(data.state)) return await send("get", `jobs/${job}/result`, { signal, onReceived });
    if (["failed", "cancelled"].includes(data.state)) {
      throw new Problem(409, "job-without-result", "No mask was made", data.reason ?? `The job was ${data.state}.`, {});
    }
    const stage = typeof data.progress.stage === "string" ? data.progress.stage : "waiting for a worker";
    onProgress({ words: `Adapting to this scan: ${stage}`, share: null });
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    signal.throwIfAborted();
  }
}

/** The request as a command, for a terminal. */
export function asCurl(question: Question, flat: boolean, authenticated: boolean): string {
  const form = { ...fields(question), output: flat ? "png" : "nifti" };
  const parts = [
    `curl ${new URL("segment", document.baseURI).href}`,
    ...(authenticated ? ['-H "Authorization: Bearer $LOCUM_KEY"'] : []),
    ...Object.entries(form).map(([name, value]) => `-F '${name}=${value}'`),
    "-F scan=@SCAN",
    `-o mask.${flat ? "png" : "nii.gz"}`,
  ];
  return parts.join(" \\\n  ");
}
