/** Cohorts and their scans: what several views choose from. Needs an operator. */
import { useEffect, useState } from "preact/hooks";
import { call, fill, pagesOf, type Schema, send } from "../api/client";
import { Select } from "../ui/controls";
import { Dialog } from "../ui/dialog";
import { bytes, many, moment } from "../ui/format";
import { Rejection } from "../ui/notice";
import { Terms } from "./glossary";

export type Cohort = Schema<"CohortView">;
export type CohortScan = Schema<"ScanView">;

/** Where a scan of a cohort is. */
export interface ScanPlace {
  hospital: string;
  cohort: string;
  name: string;
}

export async function cohortsOf(hospital: string): Promise<Cohort[]> {
  const path = { hospital };
  const pages = await pagesOf((cursor) => call("get", "/hospitals/{hospital}/cohorts", { path, query: cursor }));
  return pages.flatMap((page) => page.cohorts);
}

export async function scansOf(hospital: string, cohort: string): Promise<CohortScan[]> {
  const path = { hospital, cohort };
  const pages = await pagesOf((cursor) => call("get", "/hospitals/{hospital}/cohorts/{cohort}/scans", { path, query: cursor }));
  return pages.flatMap((page) => page.scans);
}

/** The scan as stored, or as a viewer shows it. */
export async function readScan(
  place: ScanPlace,
  output: "stored" | "display",
  onReceived?: (share: number) => void,
): Promise<Read> {
  return await read("/hospitals/{hospital}/cohorts/{cohort}/scans/{name}", place, output, onReceived);
}

/** The mask of a scan as a viewer shows it. */
export async function readMask(place: ScanPlace): Promise<Read> {
  return await read("/hospitals/{hospital}/cohorts/{cohort}/scans/{name}/mask", place, "display");
}

/** A file; whether it is a picture, which has no sides of a patient; and its entity tag. */
interface Read {
  file: Blob;
  flat: boolean;
  tag: string | null;
}

async function read(
  path: string,
  place: ScanPlace,
  output: string,
  onReceived?: (share: number) => void,
): Promise<Read> {
  const answer = await send("get", fill(path, { ...place }, { output }), onReceived ? { onReceived } : {});
  return { file: await answer.blob(), flat: isPicture(answer), tag: answer.headers.get("ETag") };
}

export const isPicture = (answer: Response): boolean => answer.headers.get("content-type") === "image/png";

/** The cohorts of a hospital, read again when `version` changes. */
export function useCohorts(hospital: string, version: unknown, onError: (error: unknown) => void): Cohort[] | null {
  const [cohorts, setCohorts] = useState<Cohort[] | null>(null);
  useEffect(() => {
    let over = false;
    if (hospital === "") setCohorts([]);
    else cohortsOf(hospital).then((found) => !over && setCohorts(found), onError);
    return () => (over = true);
  }, [hospital, version]);
  return cohorts;
}

/** What people call it, or when it was made. */
export const cohortName = (cohort: Cohort): string => cohort.name ?? moment(cohort.created_at);

/** Name a cohort and say something of it; without one, make it. */
export function NameCohort(given: { hospital: string; cohort: Cohort | undefined; onNamed: (id: string) => void }) {
  const { hospital, cohort } = given;
  const [isOpen, setOpen] = useState(false);
  return (
    <>
      <button type="button" class="button small" onClick={() => setOpen(true)}>
        {cohort ? "Name and note" : "Make a cohort with a name"}
      </button>
      {isOpen && (
        <Naming
          hospital={hospital}
          cohort={cohort}
          onClose={() => setOpen(false)}
          onNamed={(id) => {
            setOpen(false);
            given.onNamed(id);
          }}
        />
      )}
    </>
  );
}

function Naming(given: { hospital: string; cohort: Cohort | undefined; onClose: () => void; onNamed: (id: string) => void }) {
  const { hospital, cohort } = given;
  const [name, setName] = useState(cohort?.name ?? "");
  const [note, setNote] = useState(cohort?.note ?? "");
  const [error, setError] = useState<unknown>(null);
  const submit = async (event: Event) => {
    event.preventDefault();
    const json = { name: name.trim() || null, note: note.trim() || null };
    try {
      const { data } = cohort
        ? await call("patch", "/hospitals/{hospital}/cohorts/{cohort}", { path: { hospital, cohort: cohort.id }, json })
        : await call("post", "/hospitals/{hospital}/cohorts", { path: { hospital }, json });
      given.onNamed(data.id);
    } catch (found) {
      setError(found);
    }
  };
  return (
    <Dialog title={cohort ? "Name and note" : "A new cohort"} onClose={given.onClose}>
      <form class="stack" onSubmit={(event) => void submit(event)}>
        <p class="soft">People read them in lists. They outlive the scans, so they must not name a patient.</p>
        <label class="field">
          <span class="label">Name</span>
          <input type="text" value={name} maxLength={200} onInput={(event) => setName(event.currentTarget.value)} />
        </label>
        <label class="field">
          <span class="label">Note</span>
          <input type="text" value={note} maxLength={200} onInput={(event) => setNote(event.currentTarget.value)} />
        </label>
        <Rejection error={error} />
        <div class="row">
          <button type="submit" class="button primary">
            Save
          </button>
        </div>
      </form>
    </Dialog>
  );
}

export function CohortSelect(given: {
  cohorts: readonly Cohort[];
  value: string;
  /** What no cohort is called, and what it means. */
  none: { label: string; hint?: string };
  onChange: (id: string) => void;
}) {
  const cohort = given.cohorts.find((each) => each.id === given.value);
  const sizes = cohort && `${bytes(cohort.bytes)}; the scans expire on ${moment(cohort.expires_at)}.`;
  const hint = cohort ? [cohort.note, sizes].filter(Boolean).join(" · ") : given.none.hint;
  return (
    <Select
      label="Cohort"
      value={given.value}
      options={[
        ...given.cohorts.map((each) => ({ value: each.id, label: `${cohortName(each)}, ${many(each.scans, "scan")}` })),
        { value: "", label: given.none.label },
      ]}
      {...(hint ? { hint: <Terms text={hint} /> } : {})}
      onChange={given.onChange}
    />
  );
}

/** What a scan's mask says of it. */
export function maskWords(scan: CohortScan): { words: string; tone: string } {
  if (!scan.mask) return { words: "no mask", tone: "" };
  return scan.mask.values.some((value) => value !== 0)
    ? { words: "mask", tone: "good" }
    : { words: "no target", tone: "accent" };
}
