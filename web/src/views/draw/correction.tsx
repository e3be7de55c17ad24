/** Correct an answer: its scan with its mask, and what is sent to the hospital's corrections. */
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Model } from "../../app/catalogue";
import { readScan, type ScanPlace } from "../../app/cohorts";
import { correctable, type Correctable, type Correction, Worked } from "../../app/correcting";
import { address, keepInAddress, place } from "../../app/router";
import { DropZone } from "../../ui/controls";
import { Rejection } from "../../ui/notice";
import { ask, type Progress } from "../look/asking";
import { opened } from "../look/state";
import type { Label } from "./labels";
import { beginCorrection, type Open } from "./opening";
import type { SaveState } from "./saving";
import { Stage } from "./stage";

const STATES: Record<SaveState, { words: string; tone: string }> = {
  saved: { words: "As the model drew it", tone: "" },
  changed: { words: "Not sent yet", tone: "warn" },
  saving: { words: "Sending …", tone: "accent" },
  failed: { words: "Not sent", tone: "bad" },
};

/** `request`: of the answer that the address names, with the place of its scan where a cohort has it. */
export function Correcting(given: { request: string; hospital: string; model: Model; labels: readonly Label[] }) {
  const { request, hospital, model, labels } = given;
  const answer = correctable.value?.request === request ? correctable.value : null;
  const [sent, setSent] = useState<Correction | null>(null);
  const worked = useRef<Worked | null>(null);
  useEffect(() => {
    setSent(null);
    const mine = new Worked();
    worked.current = mine;
    return () => mine.stop();
  }, [answer]);
  const { parameters } = place.value;
  const [cohort, name] = [parameters.get("cohort"), parameters.get("scan")];
  const kept = cohort !== null && name !== null ? { hospital, cohort, name } : null;
  const source = useMemo(() => answer && { id: request, name: answer.name }, [answer, request]);
  return (
    <>
      <div class="workbench-side stack">
        <h1>Correct an answer</h1>
        <p class="soft">
          {answer?.model ?? model.name}, request <span class="mono">{request}</span>
        </p>
        {answer === null && <Reopen key={request} request={request} hospital={hospital} model={model} kept={kept} />}
        {sent && <Sent correction={sent} />}
        {answer && !sent && (
          <p>
            Change the mask until it is as it should be: all of it counts, not only what you touched. It is sent once, with the seconds that
            you worked, and compared with the answer. No model learns from it until the hospital agrees.
          </p>
        )}
        <a class="button small" href={address("watch", { hospital, model: model.name })}>
          Masks to look at first
        </a>
      </div>
      <Stage
        source={source}
        labels={labels}
        begin={(viewer) => beginCorrection(viewer, answer!, labels, setSent, () => worked.current?.seconds ?? 0)}
        actions={(open) => <Send open={open} sent={sent} />}
      />
    </>
  );
}

function Send({ open: { saving, drawing }, sent }: { open: Open; sent: Correction | null }) {
  const state = saving.state.value;
  const isSent = sent !== null && state === "saved";
  const isRight = drawing.isUntouched;
  const send = () => {
    if (isRight) saving.changed();
    void saving.send();
  };
  return (
    <>
      <span class={`chip ${isSent ? "good" : STATES[state].tone}`} role="status" data-save={isSent ? "sent" : state}>
        {isSent ? "Sent" : STATES[state].words}
      </span>
      <span class="grow" />
      <button type="button" class="button small" disabled={state === "saving" || (isSent && !isRight)} onClick={send}>
        {isRight ? "Accept the answer" : "Send the correction"}
      </button>
    </>
  );
}

function Sent({ correction: { accepted, cohort, scan, seconds, hospital, model } }: { correction: Correction }) {
  return (
    <div class="notice good">
      <strong>{accepted ? "The answer counts as right." : "The correction is stored."}</strong>
      <div>
        {seconds != null && `You worked ${Math.round(seconds)} seconds. `}A worker compares it with the answer.{" "}
        <a href={address("draw", { hospital, model: model.split("@")[0], cohort, scan })}>Its scan in the cohort of corrections</a>
      </div>
    </div>
  );
}

/** The scan of an answer that this page does not have: a cohort has it, or a person opens it. The model draws again. */
function Reopen(given: { request: string; hospital: string; model: Model; kept: ScanPlace | null }) {
  const { request, hospital, model, kept } = given;
  const [error, setError] = useState<unknown>(null);
  const [progress, setProgress] = useState<Progress | null>(null);
  const ending = useRef(new AbortController());
  const take = async (name: string, filesOf: () => Promise<readonly Blob[]>) => {
    const { signal } = ending.current;
    setError(null);
    try {
      const scan = await opened(name, await filesOf(), signal, setProgress);
      const question = { model: model.name, hospital, personalization: "auto" as const, site: "" };
      const { mask, report, model: by } = await ask(scan, question, signal, setProgress);
      const found: Correctable = { ...scan, request, hospital, model: by, mask, names: report.label_names };
      correctable.value = found;
    } catch (problem) {
      if (!signal.aborted) setError(problem);
    } finally {
      setProgress(null);
    }
  };
  const takeFiles = (files: readonly File[]) =>
    take(files.length === 1 ? files[0]!.name : `${files[0]!.name} and ${files.length - 1} more`, async () => files);
  const takeKept = (from: ScanPlace) =>
    take(from.name, async () => {
      const fetched = (share: number | null) => setProgress({ words: "Fetching the scan", share });
      fetched(null);
      return [(await readScan(from, "stored", fetched)).file];
    });
  useEffect(() => {
    if (kept !== null) void takeKept(kept);
    return () => ending.current.abort();
  }, []);
  return (
    <>
      <DropZone label="Drop the scan of this answer, or choose files" multiple onFiles={(files) => void takeFiles(files)}>
        <span class="hint">The page does not keep scans. The version that serves draws the mask to begin with; another scan is refused.</span>
      </DropZone>
      {progress && (
        <div role="status">
          {progress.words} … <progress max={1} value={progress.share ?? undefined} aria-label={progress.words} />
        </div>
      )}
      <Rejection error={error} />
      <button type="button" class="button small quiet" onClick={() => keepInAddress({ correct: null, cohort: null, scan: null })}>
        Draw on the scans of a cohort
      </button>
    </>
  );
}
