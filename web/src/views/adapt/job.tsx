/** One job: its stages and curves while it runs, then the gate's verdict and the evidence. */
import { useEffect, useRef, useState } from "preact/hooks";
import { call } from "../../api/client";
import { Terms } from "../../app/glossary";
import { has } from "../../app/session";
import { duration, moment, sentence } from "../../ui/format";
import { Notice, Rejection } from "../../ui/notice";
import { Loading } from "../../ui/states";
import { Verdict } from "./acceptance";
import { MaskCheck } from "./checks";
import { FINISHED, follow, type Job, sought } from "./following";
import { Sections } from "./sections";

/** `onChange` is called with the job as it is, and after every change; `onDecided` after a decision on an acceptance. */
export function JobPanel({ id, onChange, onDecided }: { id: string; onChange: (job: Job) => void; onDecided: () => void }) {
  const [job, setJob] = useState<Job | null>(null);
  const [error, setError] = useState<unknown>(null);
  const show = (found: Job) => {
    setJob(found);
    setError(null);
    onChange(found);
  };
  useEffect(() => {
    setJob(null);
    setError(null);
    return follow(id, show, setError);
  }, [id]);
  const panel = useRef<HTMLElement>(null);
  const isLoaded = job !== null;
  // On a small screen it is below the scans: a job that was just started or chosen is brought into sight.
  useEffect(() => {
    if (!isLoaded || sought.job !== id) return;
    sought.job = "";
    const top = panel.current?.getBoundingClientRect().top ?? 0;
    if (top < 0 || top > window.innerHeight / 2) panel.current?.scrollIntoView();
  }, [isLoaded, id]);
  if (job === null) return error ? <Rejection error={error} /> : <Loading what="the job" />;
  const running = !FINISHED.includes(job.state);
  const isAcceptance = job.kind === "acceptance";
  const cancel = () => call("delete", "/jobs/{job}", { path: { job: id } }).then((answer) => show(answer.data), setError);
  return (
    <section class="card stack" aria-label="Job" ref={panel}>
      <div class="row">
        <h2>
          {isAcceptance ? "Acceptance" : "Adaptation"} of {job.model}
        </h2>
        <span class={`chip ${job.status.tone}`} data-state={job.state} title={job.status.sentence}>
          {job.status.words}
        </span>
        <span class="grow" />
        {running && has("operator") && (
          <button type="button" class="button small danger" onClick={() => void cancel()}>
            Cancel the job
          </button>
        )}
        {has("operator") && (!isAcceptance || job.state === "succeeded") && (
          <a class="button small" href={isAcceptance ? `jobs/${id}/acceptance/report.html` : `jobs/${id}/card`} target="_blank" rel="noreferrer">
            {isAcceptance ? "Report" : "Before and after"}
          </a>
        )}
      </div>
      <p class="soft">
        {job.started_at ? `Started ${moment(job.started_at)}` : `Asked for ${moment(job.created_at)}`}
        {job.finished_at && job.started_at && `, took ${duration(seconds(job.started_at, job.finished_at))}`}
        {job.attempt > 1 && `, attempt ${job.attempt}`}
      </p>
      {job.no_worker && <Notice tone="warn">The job waits: {job.no_worker}.</Notice>}
      {running && <Running job={job} />}
      {running && has("operator") && <Preview job={job} />}
      {job.reason && (
        <Notice tone="warn">
          <Terms text={sentence(job.reason)} />
        </Notice>
      )}
      {job.warnings.map((warning) => (
        <Notice key={warning} tone="warn">
          <Terms text={sentence(warning)} />
        </Notice>
      ))}
      <Rejection error={error} />
      <Sections sections={job.sections} />
      {isAcceptance && <Verdict job={job} onDecided={onDecided} />}
      {job.candidate && !running && job.kind === "adaptation" && has("operator") && (
        <MaskCheck key={id} job={job} onVerdict={() => void call("get", "/jobs/{job}", { path: { job: id } }).then((answer) => show(answer.data), setError)} />
      )}
    </section>
  );
}

const seconds = (from: string, to: string) => (Date.parse(to) - Date.parse(from)) / 1000;

function Running({ job }: { job: Job }) {
  const { epoch, epochs } = job.progress as Record<string, unknown>;
  const isCounted = typeof epoch === "number" && typeof epochs === "number" && epochs > 0;
  const words = sentence(job.status.doing ?? job.status.sentence);
  return (
    <div class="stack tight" role="status">
      <span>{words}</span>
      <progress max={1} value={isCounted ? epoch / epochs : undefined} aria-label={words} />
    </div>
  );
}

/** The masks of a few slices by the present state, drawn again after each epoch. */
function Preview({ job }: { job: Job }) {
  const { epoch, preview } = job.progress as Record<string, unknown>;
  if (preview !== true) return null;
  const words = `Masks of a few slices after epoch ${epoch}`;
  return <img class="preview" src={`jobs/${job.id}/preview?epoch=${epoch}`} alt={words} />;
}
