/** Send files to a cohort, one after the other; a file that failed can be sent again. */
import { signal } from "@preact/signals";
import { call } from "../../api/client";

export interface Sending {
  key: string;
  cohort: string;
  file: File;
  state: "waiting" | "sending" | "done" | "failed";
  share: number;
  error: unknown;
}

export const uploads = signal<readonly Sending[]>([]);
let busy = false;

const change = (key: string, next: Partial<Sending>) => {
  uploads.value = uploads.value.map((each) => (each.key === key ? { ...each, ...next } : each));
};

export function add(hospital: string, cohort: string, files: readonly File[], done: () => void): void {
  const added = files.map((file) => ({
    key: `${cohort}/${file.name}`,
    cohort,
    file,
    state: "waiting" as const,
    share: 0,
    error: null,
  }));
  const keys = new Set(added.map((each) => each.key));
  uploads.value = [...uploads.value.filter((each) => !keys.has(each.key)), ...added];
  void work(hospital, done);
}

/** Send again what failed. The service changes nothing for bytes that it has. */
export function retry(hospital: string, done: () => void): void {
  uploads.value = uploads.value.map((each) =>
    each.state === "failed" ? { ...each, state: "waiting", share: 0, error: null } : each,
  );
  void work(hospital, done);
}

async function work(hospital: string, done: () => void): Promise<void> {
  if (busy) return;
  busy = true;
  try {
    for (;;) {
      const next = uploads.value.find((each) => each.state === "waiting");
      if (next === undefined) return;
      change(next.key, { state: "sending" });
      try {
        await call("put", "/hospitals/{hospital}/cohorts/{cohort}/scans/{name}", {
          path: { hospital, cohort: next.cohort, name: next.file.name },
          // Without a type, which a browser guesses by the name: the service goes by the content.
          body: new Blob([next.file], { type: "application/octet-stream" }),
          onSent: (share) => change(next.key, { share }),
        });
        change(next.key, { state: "done", share: 1 });
      } catch (error) {
        change(next.key, { state: "failed", error });
      }
      done();
    }
  } finally {
    busy = false;
  }
}
