/** Adapt: a cohort, a job on it, the verdict, and which version serves. */
import { useEffect, useState } from "preact/hooks";
import { call, type Schema } from "../../api/client";
import { catalogueError, hospitals, KINDS, loadCatalogue, models } from "../../app/catalogue";
import { keepInAddress, place } from "../../app/router";
import { has } from "../../app/session";
import { DropZone, Select } from "../../ui/controls";
import { bytes, many, moment } from "../../ui/format";
import { Notice, Rejection } from "../../ui/notice";
import "./adapt.css";
import type { Job } from "./following";
import { JobPanel, STATES } from "./job";
import { ServingPanel } from "./serving";
import { add, retry, uploads } from "./uploads";

type Cohort = Schema<"CohortView">;
type JobSummary = Schema<"JobSummary">;

const ADAPTABLE = ["routing-space", "cross-attention", "clusters"];

export default function Adapt() {
  useEffect(() => void loadCatalogue(), []);
  const [finished, setFinished] = useState<Job | null>(null);
  const parameters = place.value.parameters;
  const adaptable = models.value.filter((each) => ADAPTABLE.includes(each.kind) && each.hospital === null);
  const hospital = hospitals.value.find((each) => each.id === parameters.get("hospital")) ?? outside();
  const model = adaptable.find((each) => each.name === parameters.get("model")) ?? adaptable[0];
  const job = parameters.get("job");
  if (catalogueError.value) return <div class="center"><Rejection error={catalogueError.value} /></div>;
  if (hospital === undefined || model === undefined) {
    return (
      <div class="center">
        <Notice title="There is nothing to adapt yet">
          An admin registers a hospital, and the operator publishes a model that can be adapted.
        </Notice>
      </div>
    );
  }
  return (
    <div class="adapt">
      <div class="stack">
        <h1>Adapt a model to a hospital</h1>
        <Select
          label="Hospital"
          value={hospital.id}
          options={hospitals.value.map((each) => ({ value: each.id, label: each.name }))}
          onChange={(value) => keepInAddress({ hospital: value, job: null })}
        />
        <Select
          label="Model"
          value={model.name}
          options={adaptable.map((each) => ({ value: each.name, label: each.name }))}
          hint={KINDS[model.kind]}
          onChange={(value) => keepInAddress({ model: value, job: null })}
        />
        {has("operator") ? (
          <Scans key={hospital.id} hospital={hospital.id} model={model.name} needsMasks={model.kind === "cross-attention"} />
        ) : (
          <p class="hint">An operator uploads scans and starts a job.</p>
        )}
        <Jobs key={`${hospital.id} ${finished?.id}`} hospital={hospital.id} current={job} />
      </div>
      <div class="stack">
        {job ? (
          <JobPanel key={job} id={job} onFinished={setFinished} />
        ) : (
          <Notice title="No job is open">Drop scans of {hospital.name}, then start a job. It learns from them without masks.</Notice>
        )}
        <ServingPanel
          key={`${hospital.id} ${model.name}`}
          hospital={hospital.id}
          model={model.name}
          job={finished?.id === job ? finished : null}
        />
      </div>
    </div>
  );
}

/** The first hospital that took no part in training: it has the most to gain. */
const outside = () => hospitals.value.find((each) => each.site === null) ?? hospitals.value[0];

function Scans({ hospital, model, needsMasks }: { hospital: string; model: string; needsMasks: boolean }) {
  const [cohorts, setCohorts] = useState<Cohort[]>([]);
  const [chosen, setChosen] = useState("");
  const [error, setError] = useState<unknown>(null);
  const [busy, setBusy] = useState(false);
  const load = async () => {
    const { data } = await call("get", "/hospitals/{hospital}/cohorts", { path: { hospital } });
    setCohorts(data.cohorts);
    return data.cohorts;
  };
  useEffect(() => {
    load().then((found) => setChosen(found[0]?.id ?? ""), setError);
  }, []);
  const take = async (files: readonly File[]) => {
    setError(null);
    try {
      let id = chosen;
      if (id === "") {
        id = (await call("post", "/hospitals/{hospital}/cohorts", { path: { hospital }, json: {} })).data.id;
        setChosen(id);
      }
      add(hospital, id, files, () => void load().catch(setError));
    } catch (found) {
      setError(found);
    }
  };
  const start = async () => {
    setBusy(true);
    setError(null);
    try {
      const json = { cohort: chosen, model };
      const headers = { "Idempotency-Key": crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}` };
      const { data } = await call("post", "/hospitals/{hospital}/adaptations", { path: { hospital }, json, headers });
      keepInAddress({ hospital, model, job: (data as JobSummary).id });
    } catch (found) {
      setError(found);
    } finally {
      setBusy(false);
    }
  };
  const mine = uploads.value.filter((each) => each.cohort === chosen);
  const sending = mine.some((each) => each.state === "waiting" || each.state === "sending");
  const cohort = cohorts.find((each) => each.id === chosen);
  return (
    <section class="card stack" aria-label="Scans">
      <h2>Scans</h2>
      <Select
        label="Cohort"
        value={chosen}
        options={[
          ...cohorts.map((each) => ({ value: each.id, label: `${moment(each.created_at)}, ${many(each.scans, "scan")}` })),
          { value: "", label: "A new cohort" },
        ]}
        hint={cohort ? `${bytes(cohort.bytes)}; the scans expire on ${moment(cohort.expires_at)}.` : "It is made with the first scan."}
        onChange={setChosen}
      />
      <DropZone label="Drop scans here, or choose files" multiple onFiles={(files) => void take(files)}>
        <span class="hint">Sent again, the same file changes nothing.</span>
      </DropZone>
      {mine.length > 0 && (
        <ul class="files" aria-label="Uploads">
          {mine.map((each) => (
            <li key={each.key}>
              <div class="row">
                <span class="mono grow">{each.file.name}</span>
                <span class={`chip ${each.state === "done" ? "good" : each.state === "failed" ? "bad" : ""}`}>{each.state}</span>
              </div>
              {each.state === "sending" && <progress max={1} value={each.share} aria-label={`Sending ${each.file.name}`} />}
              {each.state === "failed" && <Rejection error={each.error} />}
            </li>
          ))}
        </ul>
      )}
      {mine.some((each) => each.state === "failed") && (
        <button type="button" class="button small" onClick={() => retry(hospital, () => void load().catch(setError))}>
          Send the failed ones again
        </button>
      )}
      {needsMasks && <p class="hint">This model joins a hospital with masks of its scans.</p>}
      <Rejection error={error} />
      <button
        type="button"
        class="button primary"
        disabled={busy || sending || (cohort?.scans ?? 0) === 0}
        onClick={() => void start()}
      >
        Start the adaptation
      </button>
    </section>
  );
}

function Jobs({ hospital, current }: { hospital: string; current: string | null }) {
  const [jobs, setJobs] = useState<JobSummary[]>([]);
  useEffect(() => {
    const query = { hospital, limit: 20 };
    call("get", "/jobs", { query }).then(
      ({ data }) => setJobs(data.jobs.filter((each) => each.kind === "adaptation")),
      () => undefined,
    );
  }, [current]);
  if (jobs.length === 0) return null;
  return (
    <section class="card stack tight" aria-label="Jobs">
      <h2>Jobs of this hospital</h2>
      <ul class="jobs">
        {jobs.map((each) => (
          <li key={each.id}>
            <button
              type="button"
              class="button quiet"
              aria-pressed={each.id === current}
              onClick={() => keepInAddress({ hospital, job: each.id, model: each.model })}
            >
              <span>{`${each.model}, ${moment(each.created_at)}`}</span>
              <span class={`chip ${STATES[each.state]?.tone}`}>{STATES[each.state]?.words ?? each.state}</span>
            </button>
          </li>
        ))}
      </ul>
    </section>
  );
}
