/** The scans of a cohort that a job learns from: choose or make the cohort, add scans, start the job. */
import { useEffect, useState } from "preact/hooks";
import { call, type Schema } from "../../api/client";
import { type Cohort, CohortSelect, NameCohort } from "../../app/cohorts";
import { address } from "../../app/router";
import { DropZone } from "../../ui/controls";
import { Rejection } from "../../ui/notice";
import { sought } from "./following";
import { add, retry, uploads } from "./uploads";

/** `onChange` is called after each scan that was sent to the cohort. */
export function CohortScans(given: {
  hospital: string;
  cohorts: readonly Cohort[];
  cohort: string;
  /** Of the model, where each is a file of its own. */
  channels: readonly string[];
  onCohort: (id: string) => void;
  onChange: () => void;
}) {
  const { hospital, cohorts, cohort } = given;
  const [error, setError] = useState<unknown>(null);
  const take = async (files: readonly File[]) => {
    setError(null);
    try {
      let id = cohort;
      if (id === "") {
        id = (await call("post", "/hospitals/{hospital}/cohorts", { path: { hospital }, json: {} })).data.id;
        given.onCohort(id);
      }
      await add(hospital, id, files, given.channels);
    } catch (found) {
      setError(found);
    }
  };
  const mine = uploads.value.filter((each) => each.cohort === cohort);
  // A scan may have arrived though its answer was lost.
  const ended = mine.filter((each) => each.state === "done" || each.state === "failed").length;
  useEffect(() => {
    if (ended > 0) given.onChange();
  }, [cohort, ended]);
  return (
    <>
      <CohortSelect
        cohorts={cohorts}
        value={cohort}
        none={{ label: "A new cohort", hint: "It is made with the first scan." }}
        onChange={given.onCohort}
      />
      <div class="row">
        <NameCohort
          key={cohort}
          hospital={hospital}
          cohort={cohorts.find((each) => each.id === cohort)}
          onNamed={(id) => {
            given.onCohort(id);
            given.onChange();
          }}
        />
      </div>
      <DropZone label="Drop scans here, or choose files" multiple onFiles={(files) => void take(files)}>
        <span class="hint">
          {given.channels.length > 0
            ? `A case is a NIfTI file for each channel: ${given.channels.map((each) => `CASE_${each}.nii.gz`).join(", ")}. `
            : "DICOM files that are dropped together are one series. "}
          Sent again, a file changes nothing.
        </span>
      </DropZone>
      {mine.length > 0 && (
        <ul class="files" aria-label="Uploads">
          {mine.map((each) => (
            <li key={each.id}>
              <div class="row">
                <span class="mono grow">{each.name}</span>
                <span class={`chip ${each.state === "done" ? "good" : each.state === "failed" ? "bad" : ""}`}>{each.state}</span>
              </div>
              {each.state === "sending" && <progress max={1} value={each.share} aria-label={`Sending ${each.name}`} />}
              {each.name !== each.file.name && <span class="hint">Another scan is named {each.file.name}.</span>}
              {each.state === "failed" && <Rejection error={each.error} />}
            </li>
          ))}
        </ul>
      )}
      {mine.some((each) => each.state === "failed") && (
        <button type="button" class="button small" onClick={() => retry(cohort)}>
          Send the failed ones again
        </button>
      )}
      <Rejection error={error} />
    </>
  );
}

/** What a job learns from, and how its button is called. */
export type JobKind = keyof typeof WORDS;
const WORDS = { scans: "Start the adaptation", masks: "Start the adaptation by masks", joining: "Start the joining" };

/** Start an adaptation, by masks or without, or a joining, and go to the job. */
export function StartJob(given: {
  hospital: string;
  cohort: string;
  model: string;
  kind: JobKind;
  disabled?: boolean;
  /** Awaited first; the job is not started where it answers false. */
  before?: () => Promise<boolean>;
}) {
  const { hospital, cohort, model } = given;
  const [error, setError] = useState<unknown>(null);
  const [busy, setBusy] = useState(false);
  const sending = uploads.value.some((each) => each.cohort === cohort && (each.state === "waiting" || each.state === "sending"));
  const start = async () => {
    setBusy(true);
    setError(null);
    try {
      if (given.before && !(await given.before())) return;
      const headers = { "Idempotency-Key": crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}` };
      const json = given.kind === "masks" ? { cohort, model, options: { preset: "masks" as const } } : { cohort, model };
      const { data } = await call("post", "/hospitals/{hospital}/adaptations", { path: { hospital }, json, headers });
      sought.job = (data as Schema<"JobSummary">).id;
      location.hash = address("adapt", { hospital, model, cohort, job: sought.job });
    } catch (found) {
      setError(found);
    } finally {
      setBusy(false);
    }
  };
  return (
    <>
      <Rejection error={error} />
      <button
        type="button"
        class="button primary"
        disabled={busy || sending || cohort === "" || given.disabled}
        onClick={() => void start()}
      >
        {WORDS[given.kind]}
      </button>
    </>
  );
}
