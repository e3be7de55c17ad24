/** Acceptance of a version at the hospital: measure it by masks, read the verdict, and let another person decide. */
import { useEffect, useState } from "preact/hooks";
import { call, type Schema } from "../../api/client";
import { CohortSelect, useCohorts } from "../../app/cohorts";
import { Decision } from "../../app/decision";
import { Terms } from "../../app/glossary";
import { keepInAddress, place } from "../../app/router";
import { has } from "../../app/session";
import { Select } from "../../ui/controls";
import { day, moment } from "../../ui/format";
import { Rejection } from "../../ui/notice";
import { FINISHED, type Job, sought } from "./following";

type Acceptances = Schema<"Acceptances">;
type JobSummary = Schema<"JobSummary">;
type Asked = { least_dice?: number; largest_bias_ml?: number };

/** Those of a page of jobs. */
const JOBS = 100;

/** `version` changes where a job has ended. */
export function AcceptancePanel(given: {
  hospital: string;
  name: string;
  model: string;
  labels: readonly string[];
  current: string | null;
  version: string;
}) {
  const { hospital, name, model, current } = given;
  const [found, setFound] = useState<Acceptances | null>(null);
  const [jobs, setJobs] = useState<readonly JobSummary[]>([]);
  const [error, setError] = useState<unknown>(null);
  const [dialog, setDialog] = useState<"measure" | "demand" | null>(null);
  const load = async () => {
    try {
      const path = { hospital };
      setFound((await call("get", "/hospitals/{hospital}/acceptances", { path })).data);
      const { data } = await call("get", "/jobs", { query: { hospital, limit: JOBS } });
      setJobs(data.jobs.filter((each) => each.kind === "acceptance" && isOf(each.model, model)));
      setError(null);
    } catch (problem) {
      setError(problem);
    }
  };
  useEffect(() => void load(), [hospital, model, given.version]);
  const close = () => {
    setDialog(null);
    void load();
  };
  return (
    <section class="card stack" aria-label="Acceptance">
      <h2>Acceptance at {name}</h2>
      <Rejection error={error} />
      <p class="hint">
        {found?.demanded
          ? `${name} demands one before any assignment, by ${found.demanded_by}${found.since ? ` since ${day(found.since)}` : ""}.`
          : "A version is scored on the hospital's own scans with masks, as it answers them. Another person than the one who measured decides."}
      </p>
      {jobs.length > 0 && (
        <ul class="picks" aria-label="Acceptances">
          {jobs.map((each) => {
            const decision = found?.decisions.find(({ job }) => job === each.id);
            const words = decision ? (decision.accepted ? "accepted" : "rejected") : each.status.words;
            return (
              <li key={each.id}>
                <button
                  type="button"
                  class="button quiet"
                  aria-pressed={each.id === current}
                  onClick={() => {
                    sought.job = each.id;
                    keepInAddress({ job: each.id });
                  }}
                >
                  <span>
                    {each.model}
                    <span class="hint">{decision ? `${moment(decision.at)}, by ${decision.actor}` : moment(each.created_at)}</span>
                  </span>
                  <span class={`chip ${decision ? (decision.accepted ? "good" : "bad") : each.status.tone}`}>{words}</span>
                </button>
              </li>
            );
          })}
        </ul>
      )}
      <div class="row">
        {has("operator") && (
          <button type="button" class="button" onClick={() => setDialog("measure")}>
            Measure a version
          </button>
        )}
        {has("approver") && found && (
          <button type="button" class="button quiet" onClick={() => setDialog("demand")}>
            {found.demanded ? "Demand it no longer" : "Demand it before an assignment"}
          </button>
        )}
      </div>
      {dialog === "measure" && <Measure hospital={hospital} model={model} labels={given.labels} onClose={close} />}
      {dialog === "demand" && found && (
        <Decision
          title={found.demanded ? "Demand it no longer" : "Demand it before an assignment"}
          send={(decided) => call("put", "/hospitals/{hospital}/acceptances", { path: { hospital }, json: { ...decided, demanded: !found.demanded } })}
          onClose={close}
        >
          <p>
            {found.demanded
              ? `Versions are assigned to ${name} without an acceptance from now on.`
              : `Only accepted versions are assigned to ${name} from now on. What serves goes on, and nothing else begins to serve by itself.`}
          </p>
        </Decision>
      )}
    </section>
  );
}

/** Whether a job is of the model, or of what was adapted from it. */
const isOf = (name: string | null, model: string): boolean => name === model || (name ?? "").startsWith(`${model}.at-`);

/** The versions that may be measured, newest first: the hospital's own, then those of the federation. */
async function versionsFor(hospital: string, model: string): Promise<string[]> {
  const [own, shared] = await Promise.all([
    call("get", "/lineage", { query: { hospital, limit: 1000 } }),
    call("get", "/models/{model}", { path: { model } }),
  ]);
  const adapted = own.data.versions
    .filter((each) => each.part_of === null && each.withdrawn === null && isOf(each.name, model))
    .map((each) => `${each.name}@${each.version}`);
  const federated = shared.data.versions.filter((each) => each.withdrawn === null).map((each) => `${model}@${each.version}`);
  return [...adapted.reverse(), ...federated.reverse()];
}

function Measure(given: { hospital: string; model: string; labels: readonly string[]; onClose: () => void }) {
  const { hospital, model, labels } = given;
  const [versions, setVersions] = useState<readonly string[]>([]);
  const [version, setVersion] = useState("");
  const [error, setError] = useState<unknown>(null);
  const cohorts = useCohorts(hospital, hospital, setError) ?? [];
  const [cohort, setCohort] = useState(place.value.parameters.get("cohort") ?? "");
  const [asked, setAsked] = useState<Record<string, Asked>>({});
  useEffect(() => {
    versionsFor(hospital, model).then((found) => {
      setVersions(found);
      setVersion((before) => before || (found[0] ?? ""));
    }, setError);
  }, [hospital, model]);
  const chosen = cohorts.some((each) => each.id === cohort) ? cohort : (cohorts[0]?.id ?? "");
  const ask = (label: string, name: keyof Asked, text: string) =>
    setAsked((before) => {
      const { [name]: _, ...others } = before[label] ?? {};
      return { ...before, [label]: text === "" ? others : { ...others, [name]: Number(text) } };
    });
  const thresholds = Object.fromEntries(Object.entries(asked).filter(([, each]) => Object.keys(each).length > 0));
  const start = async ({ actor }: { actor?: string }) => {
    const json = {
      cohort: chosen,
      model: version,
      ...(Object.keys(thresholds).length > 0 ? { thresholds: { labels: thresholds } } : {}),
      ...(actor ? { actor } : {}),
    };
    const { data } = await call("post", "/hospitals/{hospital}/acceptances", { path: { hospital }, json: json as Schema<"AcceptanceBody"> });
    sought.job = data.id;
    keepInAddress({ job: data.id });
  };
  return (
    <Decision title="Measure" isPlain isReady={chosen !== "" && version !== ""} send={start} onClose={given.onClose}>
      <Rejection error={error} />
      <Select label="Version" value={version} options={versions.map((value) => ({ value, label: value }))} onChange={setVersion} />
      <CohortSelect
        cohorts={cohorts}
        value={chosen}
        none={{ label: "Choose a cohort", hint: "Scans with masks of ten patients or more give bounds; scans without masks narrow them." }}
        onChange={setCohort}
      />
      <fieldset class="stack tight asked">
        <legend>What is asked of it</legend>
        <p class="hint">
          <Terms text="It is written before anything is measured. Without it the report has figures and no verdict." />
        </p>
        {labels.map((label) => (
          <div class="row" key={label}>
            <label class="field grow">
              <span class="label">{label}: least Dice</span>
              <input type="number" min="0" max="1" step="0.01" onInput={(event) => ask(label, "least_dice", event.currentTarget.value)} />
            </label>
            <label class="field grow">
              <span class="label">{label}: largest bias, mL</span>
              <input type="number" min="0" step="any" onInput={(event) => ask(label, "largest_bias_ml", event.currentTarget.value)} />
            </label>
          </div>
        ))}
      </fieldset>
    </Decision>
  );
}

/** The decision on a report that is there, or to be made. `onDecided` is called after one. */
export function Verdict({ job, onDecided }: { job: Job; onDecided: () => void }) {
  const [document, setDocument] = useState<Schema<"AcceptanceDocument"> | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [deciding, setDeciding] = useState<boolean | null>(null);
  const load = () =>
    call("get", "/jobs/{job}/acceptance", { path: { job: job.id } }).then(({ data }) => setDocument(data), setError);
  useEffect(() => void (job.state === "succeeded" && load()), [job.id, job.state]);
  if (!FINISHED.includes(job.state) || document === null) return error ? <Rejection error={error} /> : null;
  const { decision } = document;
  const isMet = document.report.verdict === "met";
  const measured = String(document.report.measured_by);
  const title = deciding === false ? "Reject" : isMet ? "Accept" : "Accept against the verdict";
  return (
    <div class="stack tight" role="group" aria-label="Decision">
      <p>
        Measured by {measured}.{" "}
        {decision
          ? `${decision.accepted ? "Accepted" : "Rejected"}${decision.override ? " against the verdict" : ""} by ${decision.actor} on ${moment(decision.at)}: ${decision.reason}`
          : "No one has decided yet."}
      </p>
      {document.superseded_by ? (
        <p class="hint">Superseded: the same version was measured on the same scans again, by job {document.superseded_by}.</p>
      ) : has("approver") ? (
        <div class="row">
          <button type="button" class={`button ${isMet ? "primary" : "danger"}`} onClick={() => setDeciding(true)}>
            {isMet ? "Accept" : "Accept against the verdict"}
          </button>
          <button type="button" class="button" onClick={() => setDeciding(false)}>
            Reject
          </button>
        </div>
      ) : (
        <p class="hint">An approver decides, who is not {measured}.</p>
      )}
      {deciding !== null && (
        <Decision
          title={title}
          isDanger={deciding && !isMet}
          send={(decided) =>
            call("post", "/jobs/{job}/acceptance", {
              path: { job: job.id },
              json: { ...decided, accepted: deciding, override: deciding && !isMet },
            })
          }
          onClose={(isDone) => {
            setDeciding(null);
            if (!isDone) return;
            void load();
            onDecided();
          }}
        >
          <p>
            {measured} measured {String(document.report.version)} at {job.hospital}: another person decides. The audit trail keeps both names and the reason.
          </p>
        </Decision>
      )}
    </div>
  );
}
