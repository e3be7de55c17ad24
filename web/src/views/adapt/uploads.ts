/** Send files to a cohort, one after the other; a file that failed can be sent again. */
import { signal } from "@preact/signals";
import { call } from "../../api/client";
import { kindOf } from "../../viewer/nifti";

export interface Sending {
  id: number;
  hospital: string;
  cohort: string;
  file: File;
  state: "waiting" | "sending" | "done" | "failed";
  share: number;
  error: unknown;
}

export const uploads = signal<readonly Sending[]>([]);
let busy = false;
let added = 0;

const change = (id: number, next: Partial<Sending>) => {
  uploads.value = uploads.value.map((each) => (each.id === id ? { ...each, ...next } : each));
};

/**
 * The DICOM files among `files` are sent together, as the series that they are. A file takes the place of one of the
 * same name in the list, and is sent also if that one is being sent.
 */
export async function add(hospital: string, cohort: string, files: readonly File[]): Promise<void> {
  const next = (await scansIn(files)).map((file) => ({
    id: added++,
    hospital,
    cohort,
    file,
    state: "waiting" as const,
    share: 0,
    error: null,
  }));
  const names = new Set(next.map((each) => each.file.name));
  const others = uploads.value.filter((each) => each.cohort !== cohort || !names.has(each.file.name));
  uploads.value = [...others, ...next];
  void work();
}

async function scansIn(files: readonly File[]): Promise<File[]> {
  const kinds = await Promise.all(files.map(kindOf));
  const parts = files.filter((_, i) => kinds[i] === "dicom");
  if (parts.length < 2) return [...files];
  const { zipSync } = await import("fflate");
  const contents = await Promise.all(parts.map(async (part) => new Uint8Array(await part.arrayBuffer())));
  // Ordered and called by the names, and without a time: the same files are the same scan.
  const order = parts.map((part, i) => ({ name: part.webkitRelativePath || part.name, i }));
  order.sort((one, other) => (one.name < other.name ? -1 : 1));
  const entries = order.map(({ i }, number) => [`${String(number).padStart(5, "0")}`, contents[i]!]);
  const zip = zipSync(Object.fromEntries(entries) as Record<string, Uint8Array>, { level: 0, mtime: "1980-01-01" });
  const series = new File([zip as Uint8Array<ArrayBuffer>], `${stemOf(parts[order[0]!.i]!.name)}.zip`);
  return [...files.filter((_, i) => kinds[i] !== "dicom"), series];
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
          path: { hospital: next.hospital, cohort: next.cohort, name: next.file.name },
          // Without a type, which a browser guesses by the name: the service goes by the content.
          body: new Blob([next.file], { type: "application/octet-stream" }),
          onSent: (share) => change(next.id, { share }),
        });
        change(next.id, { state: "done", share: 1 });
      } catch (error) {
        change(next.id, { state: "failed", error });
      }
    }
  } finally {
    busy = false;
  }
}
