/** One job: its stages and curves while it runs, then the gate's verdict and the evidence. */
import { useEffect, useState } from "preact/hooks";
import { call } from "../../api/client";
import { has } from "../../app/session";
import { duration, moment, percent } from "../../ui/format";
import { Notice, Rejection, type Tone } from "../../ui/notice";
import { FINISHED, follow, type Job } from "./following";

interface Check {
  name: string;
  value: number | null;
  limit: number;
  bound: string;
  passed: boolean;
  meaning: string;
  /** What a failed check says of the candidate; verdicts of older workers have none. */
  failure?: string;
}

interface Gate {
  passed: boolean;
  checks: Check[];
  /** What gain to expect, in sentences. */
  summary?: string[];
}

export const STATES: Record<string, { words: string; tone: Tone | "accent" }> = {
  queued: { words: "Waiting", tone: "plain" },
  running: { words: "Running", tone: "accent" },
  cancelling: { words: "Stopping", tone: "warn" },
  // Plain: what its gate says is another matter.
  succeeded: { words: "Made a candidate", tone: "plain" },
  fell_back: { words: "Kept the start", tone: "warn" },
  failed: { words: "Failed", tone: "bad" },
  cancelled: { words: "Cancelled", tone: "plain" },
};

const STAGES: Record<string, string> = {
  preparing: "reading scans and masks",
  joining: "learning from the masks",
  choosing: "choosing the recipe",
  adapting: "adapting",
  judging: "judging the candidate",
  drawing: "drawing the pictures",
  publishing: "publishing the candidate",
};

/** `onChange` is called with the job as it is, and after every change. */
export function JobPanel({ id, onChange }: { id: string; onChange: (job: Job) => void }) {
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
  if (job === null) return error ? <Rejection error={error} /> : <p class="soft">Loading …</p>;
  const running = !FINISHED.includes(job.state);
  const cancel = () => call("delete", "/jobs/{job}", { path: { job: id } }).then((answer) => show(answer.data), setError);
  return (
    <section class="card stack" aria-label="Job">
      <div class="row">
        <h2>Adaptation of {job.model}</h2>
        <span class={`chip ${STATES[job.state]?.tone}`} data-state={job.state}>
          {STATES[job.state]?.words ?? job.state}
        </span>
        <span class="grow" />
        {running && has("operator") && (
          <button type="button" class="button small danger" onClick={() => void cancel()}>
            Cancel the job
          </button>
        )}
        {has("operator") && (
          <a class="button small" href={`jobs/${id}/card`} target="_blank" rel="noreferrer">
            Before and after
          </a>
        )}
      </div>
      <p class="soft">
        Started {moment(job.created_at)}
        {job.finished_at && job.started_at && `, took ${duration(seconds(job.started_at, job.finished_at))}`}
        {job.attempt > 1 && `, attempt ${job.attempt}`}
      </p>
      {job.no_worker && <Notice tone="warn">The job waits: {job.no_worker}.</Notice>}
      {running && <Running job={job} />}
      {running && has("operator") && <Preview job={job} />}
      {job.reason && <Notice tone="warn">{job.reason}</Notice>}
      {job.warnings.map((warning) => (
        <Notice key={warning} tone="warn">
          {warning}
        </Notice>
      ))}
      <Rejection error={error} />
      {job.gate && <Verdict job={job} />}
      <Curves epochs={job.epochs} />
      {job.coefficients && <HeatMap found={job.coefficients as unknown as Coefficients} />}
      <Playbook found={practiceOf(job)} />
      <Attention result={job.result} />
    </section>
  );
}

const seconds = (from: string, to: string) => (Date.parse(to) - Date.parse(from)) / 1000;

function Running({ job }: { job: Job }) {
  const { stage, epoch, epochs, seconds_left: left } = job.progress as Record<string, unknown>;
  const isCounted = typeof epoch === "number" && typeof epochs === "number";
  const waiting = job.queue_position ? `${job.queue_position} ahead of it` : "waiting for a worker";
  const words = typeof stage === "string" ? (STAGES[stage] ?? stage) : waiting;
  return (
    <div class="stack tight" role="status">
      <span>
        {words}
        {isCounted && `, pass ${epoch} of ${epochs}`}
        {typeof left === "number" && `, about ${duration(left)} left`}
      </span>
      <progress max={1} value={isCounted && epochs > 0 ? epoch / epochs : undefined} aria-label={words} />
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

/** The gate in words: what it decided, what gain to expect, why it rejects, and check by check. */
function Verdict({ job }: { job: Job }) {
  const gate = job.gate as unknown as Gate;
  const failed = gate.checks.filter((check) => !check.passed);
  const title = gate.passed ? "The candidate passed its gate" : "The gate rejects the candidate";
  return (
    <div class="stack tight">
      <Notice tone={gate.passed ? "good" : "bad"} title={title}>
        {gate.summary?.map((sentence) => <p key={sentence}>{sentence}</p>)}
        {failed.length > 0 && (
          <ul class="reasons">
            {failed.map((check) => (
              <li key={check.name}>{check.failure ?? `Not passed: ${named(check.name)} (${check.meaning}).`}</li>
            ))}
          </ul>
        )}
      </Notice>
      <details>
        <summary>All {gate.checks.length} checks</summary>
        <div class="scroll">
          <table>
            <thead>
              <tr>
                <th scope="col">Check</th>
                <th scope="col" class="number">Found</th>
                <th scope="col" class="number">Limit</th>
                <th scope="col">Verdict</th>
              </tr>
            </thead>
            <tbody>
              {gate.checks.map((check) => (
                <tr key={check.name}>
                  <td>
                    {named(check.name)}
                    <div class="hint">{check.meaning}</div>
                  </td>
                  <td class="number">{check.value === null ? "–" : figure(check.value)}</td>
                  <td class="number">
                    {check.bound} {figure(check.limit)}
                  </td>
                  <td>
                    <Outcome check={check} />
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      </details>
    </div>
  );
}

function Outcome({ check }: { check: Check }) {
  // A check that could not be measured may still count as failed.
  if (!check.passed) return <span class="chip bad">failed</span>;
  return check.value === null ? <span class="chip">not measured</span> : <span class="chip good">passed</span>;
}

interface Practice {
  recipe: string;
  promise: string;
  tried: { recipe: string; predicted: number; bound: number }[];
}

const practiceOf = (job: Job) => (job.result as { playbook?: Practice } | null)?.playbook;

const named = (name: string) => name.replaceAll("_", " ");
const figure = (value: number) => (Number.isInteger(value) ? String(value) : value.toPrecision(3));

/** Each figure of the epochs as a line of its own. */
function Curves({ epochs }: { epochs: Job["epochs"] }) {
  const names = Object.keys(epochs[0] ?? {}).filter(
    (name) => name !== "epoch" && epochs.every((each) => typeof each[name] === "number"),
  );
  if (epochs.length < 2 || names.length === 0) return null;
  return (
    <div class="curves">
      {names.map((name) => {
        const values = epochs.map((each) => each[name] as number);
        const [low, high] = [Math.min(...values), Math.max(...values)];
        const path = values
          .map((value, i) => {
            const y = high > low ? 42 - (36 * (value - low)) / (high - low) : 24;
            return `${(i * 200) / (values.length - 1)},${y}`;
          })
          .join(" ");
        return (
          <figure key={name} class="curve">
            <figcaption>
              {named(name)} <span class="soft">{figure(values.at(-1)!)}</span>
            </figcaption>
            <svg viewBox="-3 0 206 48" role="img" aria-label={`${named(name)}, from ${figure(values[0]!)} to ${figure(values.at(-1)!)}`}>
              <polyline points={path} />
            </svg>
          </figure>
        );
      })}
    </div>
  );
}

interface Coefficients {
  layers: string[];
  models: string[];
  values: number[][];
}

/** How much of each member's model is in each layer. */
function HeatMap({ found }: { found: Coefficients }) {
  return (
    <details>
      <summary>Which member's model is in which layer</summary>
      <div class="scroll">
        <table class="heat">
          <thead>
            <tr>
              <th scope="col">Layer</th>
              {found.models.map((model) => (
                <th key={model} scope="col" class="number">
                  {model}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {found.layers.map((layer, row) => (
              <tr key={layer}>
                <th scope="row">{layer}</th>
                {found.values[row]!.map((share, column) => (
                  <td key={found.models[column]} class="number">
                    <span class="heat-bar" style={{ width: `${Math.round(100 * Math.max(0, Math.min(1, share)))}%` }} />
                    <span class="heat-text">{share.toFixed(2)}</span>
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </details>
  );
}

/** The recipes that the members practised, and what each promises here. */
function Playbook({ found }: { found: Practice | undefined }) {
  if (!found?.tried) return null;
  return (
    <details>
      <summary>What the members' practice expects of each recipe</summary>
      <p class="hint">{found.promise}</p>
      <table>
        <thead>
          <tr>
            <th scope="col">Recipe</th>
            <th scope="col" class="number">Expected change of Dice</th>
            <th scope="col" class="number">Lower bound</th>
          </tr>
        </thead>
        <tbody>
          {found.tried.map((each) => (
            <tr key={each.recipe}>
              <td>
                {each.recipe} {each.recipe === found.recipe && <span class="chip accent">taken</span>}
              </td>
              <td class="number">{each.predicted.toFixed(3)}</td>
              <td class="number">{each.bound.toFixed(3)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </details>
  );
}

/** How much of its attention a joined model pays to the scan itself, and to what each member shared. */
function Attention({ result }: { result: Job["result"] }) {
  const found = result?.attention as Record<string, number> | null | undefined;
  if (!found) return null;
  return (
    <details>
      <summary>What the model pays attention to</summary>
      <p class="hint">Nearly all on the scan itself means that what the members shared is ignored.</p>
      <table class="heat">
        <thead>
          <tr>
            <th scope="col">Source</th>
            <th scope="col" class="number">
              Share
            </th>
          </tr>
        </thead>
        <tbody>
          {Object.entries(found).map(([source, share]) => (
            <tr key={source}>
              <th scope="row">{source === "own" ? "the scan itself" : source}</th>
              <td class="number">
                <span class="heat-bar" style={{ width: percent(share).replace(" ", "") }} />
                <span class="heat-text">{percent(share)}</span>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </details>
  );
}
