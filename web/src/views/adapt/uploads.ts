/**
 * Send files to a cohort, one after the other; a file that failed can be sent again.
 *
 * A cohort has one scan of a name. Another scan of the same name gets a short digest of its bytes into its name, so that
 * it has the same name when it is sent again.
 */
import { signal } from "@preact/signals";
import { call, Problem } from "../../api/client";
import { casesOf } from "../../app/channels";
import { kindOf } from "../../viewer/nifti";

/** Of a scan's name in a cohort. */
const LONGEST = 200;

export interface Sending {
  id: number;
  hospital: string;
  cohort: string;
  file: File;
  /** Of the scan in the cohort. */
  name: string;
  state: "waiting" | "sending" | "done" | "failed";
  share: number;
  error: unknown;
}

export const uploads = signal<readonly Sending[]>([]);
let busy = false;
let added = 0;
let turn: Promise<void> = Promise.resolve();

const change = (id: number, next: Partial<Sending>) => {
  uploads.value = uploads.value.map((each) => (each.id === id ? { ...each, ...next } : each));
};

/**
 * The DICOM files among `files` are sent together, as the series that they are, and so are a header (.hdr) and its voxels
 * (.img) of one name. A file takes the place of the same one in the list, also while that one is being sent, and of
 * another one of its name that failed.
 *
 * For a model with `channels` of their own, the NIfTI files of a case are one scan. Throws Error where one is missing.
 */
export function add(hospital: string, cohort: string, files: readonly File[], channels: readonly string[]): Promise<void> {
  // One drop after the other: each names its files beside those of the one before.
  const adding = turn.then(async () => {
    for (const file of await scansIn(files, channels)) await enter(hospital, cohort, file);
    void work();
  });
  turn = adding.catch(() => undefined);
  return adding;
}

async function enter(hospital: string, cohort: string, file: File): Promise<void> {
  const alike = uploads.value.filter((each) => each.cohort === cohort && each.file.name === file.name);
  const isEqual = await Promise.all(alike.map((each) => haveSameBytes(each.file, file)));
  const same = alike.find((_, i) => isEqual[i]);
  const replaced = same ?? alike.find((each) => each.state === "failed");
  const isTaken = alike.some((each) => each !== replaced);
  const name = same?.name ?? (isTaken ? await withDigest(file) : file.name);
  const next: Sending = { id: added++, hospital, cohort, file, name, state: "waiting", share: 0, error: null };
  uploads.value = [...uploads.value.filter((each) => each.id !== replaced?.id), next];
}

async function haveSameBytes(one: File, other: File): Promise<boolean> {
  if (one.size !== other.size) return false;
  try {
    const [a, b] = (await Promise.all([one.arrayBuffer(), other.arrayBuffer()])).map((each) => new Uint8Array(each));
    return a!.every((byte, i) => byte === b![i]);
  } catch {
    // A file that was changed or moved since it was dropped cannot be read.
    return false;
  }
}

/** The file's name with a digest of its bytes before its ending. */
async function withDigest(file: File): Promise<string> {
  const [, stem, ending] = /^(.*?)((?:\.nii)?\.\w+)?$/s.exec(file.name)!;
  return nameWith(stem!, new Uint8Array(await file.arrayBuffer()), ending ?? "");
}

/** FNV-1a of 32 bits: browsers have SHA-256 over HTTPS only. */
function nameWith(stem: string, content: Uint8Array, ending: string): string {
  let digest = 0x811c9dc5;
  for (const byte of content) digest = Math.imul(digest ^ byte, 0x01000193);
  const text = (digest >>> 0).toString(16).padStart(8, "0");
  return `${stem.slice(0, LONGEST - text.length - ending.length - 1)}-${text}${ending}`;
}

async function scansIn(given: readonly File[], channels: readonly string[]): Promise<File[]> {
  const files = await withPairs(given);
  const kinds = await Promise.all(files.map(kindOf));
  const volumes = channels.length > 0 ? files.filter((_, i) => kinds[i] === "nifti") : [];
  const { cases, others } = casesOf(volumes, channels);
  const joined: File[] = [];
  for (const [name, of] of cases) joined.push(await joinedOf(name, of));
  const parts = files.filter((file, i) => kinds[i] === "dicom" && !volumes.includes(file));
  const rest = [...files.filter((_, i) => kinds[i] !== "dicom").filter((file) => !volumes.includes(file)), ...others, ...joined];
  return parts.length < 2 ? [...rest, ...parts] : [...rest, await seriesOf(parts)];
}

/** The files, with a header and the voxels of its name as one. */
async function withPairs(files: readonly File[]): Promise<File[]> {
  const kinds = await Promise.all(files.map(kindOf));
  const voxels = new Map(files.map((file) => [file.name.toLowerCase(), file]));
  const made: File[] = [];
  const used = new Set<File>();
  for (const header of files.filter((_, i) => kinds[i] === "header")) {
    const own = voxels.get(header.name.toLowerCase().replace(/\.hdr(\.gz)?$/, ".img$1"));
    if (own === undefined || own === header) continue;
    const [head, body] = await Promise.all([header, own].map(async (file) => new Uint8Array(await file.arrayBuffer())));
    made.push(new File([await zipOf([["00000", head!], ["00001", body!]])], `${header.name}.zip`));
    used.add(header).add(own);
  }
  return [...files.filter((file) => !used.has(file)), ...made];
}

/** The channels of a case as one file, as the service takes it: bytes that depend on the channels alone. */
async function joinedOf(name: string, channels: ReadonlyMap<string, File>): Promise<File> {
  const entries: [string, Uint8Array][] = [];
  for (const channel of [...channels.keys()].sort()) {
    entries.push([`channels/${channel}/00000`, new Uint8Array(await channels.get(channel)!.arrayBuffer())]);
  }
  const zip = await zipOf(entries);
  return new File([zip], name === "" ? nameWith("channels", zip, ".zip") : `${name}.zip`);
}

async function seriesOf(parts: readonly File[]): Promise<File> {
  const contents = await Promise.all(parts.map(async (part) => new Uint8Array(await part.arrayBuffer())));
  // Ordered and called by the names, and without a time: the same files are the same scan.
  const order = parts.map((part, i) => ({ name: part.webkitRelativePath || part.name, i }));
  order.sort((one, other) => (one.name < other.name ? -1 : 1));
  const zip = await zipOf(order.map(({ i }, number) => [String(number).padStart(5, "0"), contents[i]!]));
  // Many exports name the first file of every series alike.
  const name = nameWith(stemOf(parts[order[0]!.i]!.name), zip, ".zip");
  return new File([zip], name);
}

/** A zip without times, stored: pixels hardly shrink. */
async function zipOf(entries: readonly (readonly [string, Uint8Array])[]): Promise<Uint8Array<ArrayBuffer>> {
  const { zipSync } = await import("fflate");
  return zipSync(Object.fromEntries(entries), { level: 0, mtime: "1980-01-01" }) as Uint8Array<ArrayBuffer>;
}

const stemOf = (name: string) => name.replace(/\.dcm$/i, "");

/** Send again what failed of a cohort. The service changes nothing for bytes that it has. */
export function retry(cohort: string): void {
  uploads.value = uploads.value.map((each) =>
    each.cohort === cohort && each.state === "failed" ? { ...each, state: "waiting", share: 0, error: null } : each,
  );
  void work();
}

async function work(): Promise<void> {
  if (busy) return;
  busy = true;
  try {
    for (;;) {
      const next = uploads.value.find((each) => each.state === "waiting");
      if (next === undefined) return;
      change(next.id, { state: "sending" });
      try {
        await call("put", "/hospitals/{hospital}/cohorts/{cohort}/scans/{name}", {
          path: { hospital: next.hospital, cohort: next.cohort, name: next.name },
          // Without a type, which a browser guesses by the name: the service goes by the content.
          body: new Blob([next.file], { type: "application/octet-stream" }),
          onSent: (share) => change(next.id, { share }),
        });
        change(next.id, { state: "done", share: 1 });
      } catch (error) {
        const isTaken = error instanceof Problem && error.slug === "scan-name-taken" && next.name === next.file.name;
        const name = isTaken ? await withDigest(next.file).catch(() => next.name) : next.name;
        change(next.id, name === next.name ? { state: "failed", error } : { state: "waiting", name, share: 0 });
      }
    }
  } finally {
    busy = false;
  }
}
