/** Ask the service for a mask, and wait for it where a job makes it. */
import { call, Problem, send, type Schema } from "../../api/client";
import { endOfName } from "../../app/channels";
import { upperFirst } from "../../ui/format";

export type Report = Schema<"SegmentationReport">;
export type ClassReport = Schema<"ClassificationReport">;
export type Personalization = "auto" | "global" | "member" | "hospital" | "scan";

export interface Question {
  /** Reference of the model, as a request names it. */
  model: string;
  hospital: string;
  personalization: Personalization;
  site: string;
}

/** Who answered a question. */
export interface Answered {
  question: Question;
  /** `name@version`, and which model inside it. */
  model: string;
  personalization: string;
}

/** The answer of a classifier. */
export interface Classified extends Answered {
  report: ClassReport;
  flat: boolean;
}

/** The answer of a segmenter: the mask as a file that the viewer reads, and the report. */
export interface Answer extends Answered {
  mask: { file: Blob; name: string; flat: boolean };
  report: Report;
  /** Digest of the network that answered. */
  graph: string;
  /** Whether a job made it, since the scan takes long. */
  byJob: boolean;
}

export interface Progress {
  words: string;
  /** 0 to 1; null where it is not known. */
  share: number | null;
}

/** Short: a job that takes longer is followed, and shows how far it is. */
const WAIT_SECONDS = 2;
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
  const request = async (output: string) =>
    await posted("segment", scan, { ...fields(question), output }, signal, sent, onProgress);
  if (!flat) {
    const answer = await request("multipart");
    const parts = await answer.formData();
    const report = JSON.parse(String(parts.get("params"))) as Report;
    return build(question, answer, report, { file: parts.get("image") as File, name: "mask.nrrd", flat });
  }
  // A picture's mask has no position, and so the service makes no NRRD of it: two requests, which a version assigned
  // between them would mix. The page saves one with the identity for its geometry.
  for (let attempt = 0; attempt < 2; attempt++) {
    const mask = await request("png");
    const answer = await request("json");
    if (graphOf(mask) !== graphOf(answer)) continue;
    return build(question, mask, (await answer.json()) as Report, { file: await mask.blob(), name: "mask.png", flat });
  }
  throw changed("The mask and its sizes are of different versions.");
}

/** Classify a scan. Throws Problem, and AbortError when `signal` ended it. */
export async function askClass(
  scan: Sent,
  question: Question,
  signal: AbortSignal,
  onProgress: (progress: Progress) => void,
): Promise<Classified> {
  onProgress({ words: "Sending the scan", share: 0 });
  const sent = (share: number) =>
    onProgress(share < 1 ? { words: "Sending the scan", share } : { words: "The model is working", share: null });
  const answer = await posted("classify", scan, fields(question), signal, sent, onProgress);
  const report = (await answer.json()) as ClassReport;
  return { ...answered(question, answer, report), report, flat: scan.flat };
}

const madeByJobs = new WeakSet<Response>();
const maps = new WeakMap<Answer, Blob>();

/** The uncertainty of each voxel of an answer, in percent; kept once it has arrived. Throws Problem. */
export async function uncertaintyOf(scan: Sent, answer: Answer, signal: AbortSignal): Promise<Blob> {
  const known = maps.get(answer);
  if (known !== undefined) return known;
  const values = { ...fields(answer.question), voxels: "uncertainty", output: answer.mask.flat ? "png" : "nifti" };
  const sent = await posted("segment", scan, values, signal, () => undefined, () => undefined);
  if (graphOf(sent) !== answer.graph) throw changed("The uncertainty would be that of another version than the mask.");
  const found = await sent.blob();
  maps.set(answer, found);
  return found;
}

/** The mask of an answer to a DICOM scan in DICOM, which the service makes by answering again. Throws Problem. */
export async function dicomOf(scan: Sent, answer: Answer, output: "dicom-seg" | "dicom-rtstruct"): Promise<Blob> {
  const nothing = () => undefined;
  const values = { ...fields(answer.question), output };
  const sent = await posted("segment", scan, values, new AbortController().signal, nothing, nothing);
  if (graphOf(sent) !== answer.graph) throw changed("The file would be that of another version than the mask.");
  return await sent.blob();
}

const graphOf = (answer: Response): string => answer.headers.get("Locum-Graph") ?? "";

const changed = (reason: string) =>
  new Problem(409, "model-changed", "The model was changed meanwhile", `${reason} Segment the scan again.`, {});

function build(question: Question, answer: Response, report: Report, mask: Answer["mask"]): Answer {
  return { ...answered(question, answer, report), mask, report, graph: graphOf(answer), byJob: madeByJobs.has(answer) };
}

function answered(question: Question, answer: Response, { receipt }: Pick<Report, "receipt">): Answered {
  const model = answer.headers.get("Locum-Model") ?? receipt.model.name;
  return { question, model, personalization: answer.headers.get("Locum-Personalization") ?? "" };
}

/** Put the files of a scan into a form: those of a series, or each channel's, named by the end of its file's name. */
export function attach(body: FormData, files: readonly Blob[]): void {
  for (const file of files) body.append(files.length > 1 ? fieldOf(file) : "scan", file, "scan");
}

function fieldOf(file: Blob): string {
  const channel = file instanceof File ? endOfName(file.name) : null;
  return channel === null ? "scan" : `scan.${channel}`;
}

async function posted(
  operation: "segment" | "classify",
  scan: Sent,
  values: Record<string, string>,
  signal: AbortSignal,
  onSent: (share: number) => void,
  onProgress: (progress: Progress) => void,
): Promise<Response> {
  const body = new FormData();
  // Text first: the service checks it before the scan arrives.
  for (const [name, value] of Object.entries(values)) body.set(name, value);
  attach(body, scan.files);
  const headers = { Prefer: `wait=${WAIT_SECONDS}` };
  const onReceived = (share: number) => onProgress({ words: "Receiving the mask", share });
  const answer = await send("post", operation, { body, signal, onSent, onReceived, headers });
  if (answer.status !== 202) return answer;
  const job = ((await answer.json()) as Schema<"JobView">).id;
  try {
    const found = await result(job, signal, onProgress, onReceived);
    madeByJobs.add(found);
    // The page has it now. Where the caller may not delete it, it expires.
    void call("delete", "/jobs/{job}/files", { path: { job } }).catch(() => undefined);
    return found;
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
    const words = data.no_worker ?? data.status.doing ?? data.status.words;
    const [window, windows] = [data.progress.window, data.progress.windows];
    const share = typeof window === "number" && typeof windows === "number" ? window / windows : null;
    onProgress({ words: data.kind === "scan" ? `For this scan alone: ${words}` : upperFirst(words), share });
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    signal.throwIfAborted();
  }
}

/** The request as a command, for a terminal: a file for each channel of a scan that has several. */
export function asCurl({ question, byJob }: Answer, scan: Sent, authenticated: boolean): string {
  const form = { ...fields(question), output: scan.flat ? "png" : "nifti" };
  const mask = `-o mask.${scan.flat ? "png" : "nii.gz"}`;
  if (!byJob) return curl("segment", form, authenticated, [...partsOf(scan), mask]);
  const result = curl("jobs/ID/result", {}, authenticated, [mask]).replaceAll(" \\\n ", "");
  return `${curl("segment", form, authenticated, partsOf(scan))}\n# It answers with a job; once that has succeeded:\n# ${result}`;
}

function partsOf({ files }: Sent): string[] {
  const fields = files.map(fieldOf);
  if (files.length < 2 || fields.includes("scan")) return ["-F scan=@SCAN"];
  return files.map((file, i) => `-F '${fields[i]}=@${(file as File).name.replaceAll("'", "'\\''")}'`);
}

/** The request for classes as a command, for a terminal. */
export const asCurlOfClasses = (question: Question, authenticated: boolean): string =>
  curl("classify", fields(question), authenticated, ["-F scan=@SCAN"]);

function curl(operation: string, form: Record<string, string>, authenticated: boolean, last: readonly string[]): string {
  const parts = [
    `curl ${new URL(operation, document.baseURI).href}`,
    ...(authenticated ? ['-H "Authorization: Bearer $LOCUM_KEY"'] : []),
    ...Object.entries(form).map(([name, value]) => `-F '${name}=${value}'`),
    ...last,
  ];
  return parts.join(" \\\n  ");
}
