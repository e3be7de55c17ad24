/** Adapt: a cohort, a job on it, the verdict, and which version serves. */
import { useEffect, useState } from "preact/hooks";
import { call, type Schema } from "../../api/client";
import { catalogueLoaded, hospitals, loadCatalogue, type Model, models } from "../../app/catalogue";
import { type Cohort, useCohorts } from "../../app/cohorts";
import { Catalogue, Missing } from "../../app/empty";
import { Terms } from "../../app/glossary";
import { rememberHospital } from "../../app/remembered";
import { address, keepInAddress, place } from "../../app/router";
import { has } from "../../app/session";
import { Select } from "../../ui/controls";
import { moment, sentence } from "../../ui/format";
import { Notice, Rejection } from "../../ui/notice";
import { Empty } from "../../ui/states";
import { AcceptancePanel } from "./acceptance";
import "./adapt.css";
import { FINISHED, type Job, sought } from "./following";
import { JobPanel } from "./job";
import { CohortScans, StartJob } from "./scans";
import { ServingPanel } from "./serving";

type JobSummary = Schema<"JobSummary">;

export default function Adapt() {
  useEffect(() => void loadCatalogue().then(openWork), []);
  const [latest, setLatest] = useState<Job | null>(null);
  const [decided, setDecided] = useState(0);
  const parameters = place.value.parameters;
  const adaptable = adaptableModels();
  const named = { hospital: parameters.get("hospital"), model: parameters.get("model") };
  const hospital = named.hospital ? hospitals.value.find((each) => each.id === named.hospital) : outside();
  const model = named.model ? adaptable.find((each) => each.name === named.model) : adaptable[0];
  const job = parameters.get("job");
  const jobs = useJobs(hospital?.id ?? "", `${job} ${latest?.id} ${latest?.state}`);
  if (!catalogueLoaded.value) return <Catalogue title="Adapt" />;
  if (hospitals.value.length === 0 || adaptable.length === 0) {
    const lacks = adaptable.length === 0 ? "No model that can be adapted" : null;
    return <Missing title="There is nothing to adapt yet" lacks={lacks} hospital={hospitals.value.length === 0} />;
  }
  const choices = (
    <>
      <h1>Adapt a model to a hospital</h1>
      <Select
        label="Hospital"
        value={hospital?.id ?? ""}
        options={[
          ...(hospital ? [] : [{ value: "", label: "Choose a hospital", disabled: true }]),
          ...hospitals.value.map((each) => ({ value: each.id, label: each.name })),
        ]}
        onChange={(value) => {
          rememberHospital(value);
          keepInAddress({ hospital: value, job: null, cohort: null });
        }}
      />
      <Select
        label="Model"
        value={model?.name ?? ""}
        options={[
          ...(model ? [] : [{ value: "", label: "Choose a model", disabled: true }]),
          ...adaptable.map((each) => ({ value: each.name, label: each.name })),
        ]}
        hint={model && <Terms text={sentence(model.summary)} />}
        onChange={(value) => keepInAddress({ model: value, job: null, cohort: null })}
      />
    </>
  );
  // In place of one that is not there no other is adapted: a person chooses.
  if (hospital === undefined || model === undefined) {
    return (
      <div class="adapt">
        <div class="stack">{choices}</div>
        <Notice title="The address names what is not here">
          <div class="stack tight">
            {hospital === undefined && (
              <p>
                No hospital <span class="mono">{named.hospital}</span> is registered. Choose one that is.
              </p>
            )}
            {model === undefined && (
              <p>
                No model <span class="mono">{named.model}</span> that can be adapted is in the store. Choose one that is.
              </p>
            )}
          </div>
        </Notice>
      </div>
    );
  }
  const needsMasks = model.masks === "required";
  return (
    <div class="adapt">
      <div class="stack">
        {choices}
        {has("operator") ? (
          <Scans key={hospital.id} hospital={hospital.id} model={model} jobs={jobs} current={job} />
        ) : (
          <p class="hint">An operator uploads scans and starts a job.</p>
        )}
        <Jobs hospital={hospital.id} jobs={jobs ?? []} current={job} />
      </div>
      <div class="stack">
        {job ? (
          <JobPanel key={job} id={job} onChange={setLatest} onDecided={() => setDecided((before) => before + 1)} />
        ) : (
          <Empty title="No job is open">
            <Terms
              text={
                needsMasks
                  ? `Drop scans of ${hospital.name}, draw masks of some, then start the adaptation: it learns from the masks.`
                  : `Drop scans of ${hospital.name}, or choose a cohort that is there, then start the adaptation: it learns from scans without masks.`
              }
            />
          </Empty>
        )}
        <ServingPanel
          key={`${hospital.id} ${model.name}`}
          hospital={hospital.id}
          name={hospital.name}
          model={model.name}
          job={latest?.id === job && FINISHED.includes(latest.state) ? latest : null}
        />
        {model.answers === "/segment" && (
          <AcceptancePanel
            key={`${hospital.id} ${model.name} acceptance`}
            hospital={hospital.id}
            name={hospital.name}
            model={model.name}
            labels={model.labels}
            current={job}
            version={`${latest?.id} ${latest?.state} ${decided}`}
          />
        )}
      </div>
    </div>
  );
}

const adaptableModels = () => models.value.filter((each) => each.adaptable && each.hospital === null);

/** An address that names nothing opens the newest job: one that runs, else one whose candidate was not rejected. */
async function openWork(): Promise<void> {
  const said = place.peek().parameters;
  if (said.has("hospital") || said.has("model") || said.has("job")) return;
  try {
    const { data } = await call("get", "/jobs", { query: { limit: 100 } });
    const all = data.jobs.filter(
      (each) =>
        each.kind === "adaptation" &&
        hospitals.peek().some(({ id }) => id === each.hospital) &&
        adaptableModels().some(({ name }) => name === each.model),
    );
    const found =
      all.find((each) => !FINISHED.includes(each.state)) ?? all.find((each) => each.passed === true) ?? all[0];
    if (found) keepInAddress({ hospital: found.hospital, model: found.model, job: found.id });
  } catch {
    // The lists say what is wrong with the service; this is a convenience.
  }
}

/** The first hospital that took no part in training: it has the most to gain. */
const outside = () => hospitals.value.find((each) => each.site === null) ?? hospitals.value[0];

function Scans(given: { hospital: string; model: Model; jobs: readonly JobSummary[] | null; current: string | null }) {
  const { hospital, model, jobs, current } = given;
  const [version, setVersion] = useState(0);
  const [error, setError] = useState<unknown>(null);
  const found = useCohorts(hospital, version, setError);
  const cohorts = found ?? [];
  const wanted = place.value.parameters.get("cohort");
  // A cohort that was just made is not listed yet; `new` asks for another one.
  const chosen = wanted === "new" ? "" : (wanted ?? (jobs && firstCohort(cohorts, jobs, model.name, current)?.id) ?? "");
  const cohort = cohorts.find((each) => each.id === chosen);
  const joins = model.kind === "cross-attention";
  return (
    <section class="card stack" aria-label="Scans">
      <h2>Scans</h2>
      <CohortScans
        hospital={hospital}
        cohorts={cohorts}
        cohort={chosen}
        channels={model.channel_names}
        onCohort={(id) => keepInAddress({ cohort: id || "new" })}
        onChange={() => setVersion((last) => last + 1)}
      />
      <Rejection error={error} />
      {model.masks !== "none" && (
        <p class="hint">
          <Terms
            text={
              joins
                ? "This model joins a hospital with masks of some of its scans."
                : model.masks === "required"
                  ? "This model is adapted by masks of some scans."
                  : "Where scans alone do not help, masks of five to twenty of them can: an adaptation learns from the masks that its cohort has."
            }
          />{" "}
          <a href={address("draw", { hospital, model: model.name, cohort: chosen })}>Draw them</a>, or send them with a script.
        </p>
      )}
      <StartJob
        hospital={hospital}
        cohort={chosen}
        model={model.name}
        kind={joins ? "joining" : model.masks === "required" ? "masks" : "scans"}
        disabled={(cohort?.scans ?? 0) === 0}
      />
    </section>
  );
}

/**
 * The cohort of the open job; else the newest one, if it came after the last adaptation and so waits for one; else that of
 * the model's last adaptation that passed, or the last. A cohort that earlier adaptations passed over is none to start with: it may be kept for tests.
 */
function firstCohort(cohorts: readonly Cohort[], jobs: readonly JobSummary[], model: string, current: string | null) {
  const of = (job: JobSummary | undefined) => job && cohorts.find((each) => each.id === job.cohort);
  const [newest, last] = [cohorts[0], jobs[0]];
  const isWaiting = newest !== undefined && (last === undefined || newest.created_at > last.created_at);
  const open = of(jobs.find((each) => each.id === current));
  const own = jobs.filter((each) => each.model === model && of(each));
  return open ?? (isWaiting ? newest : of(own.find((each) => each.passed === true) ?? own[0]));
}

/** The newest adaptations of a hospital, read again when `version` changes; null before they have arrived. */
function useJobs(hospital: string, version: string): JobSummary[] | null {
  const [found, setFound] = useState<{ hospital: string; jobs: JobSummary[] } | null>(null);
  useEffect(() => {
    let over = false;
    const keep = (jobs: JobSummary[]) => over || setFound({ hospital, jobs });
    if (hospital === "") return;
    call("get", "/jobs", { query: { hospital, limit: 20 } }).then(
      ({ data }) => keep(data.jobs.filter((each) => each.kind === "adaptation")),
      () => keep([]),
    );
    return () => {
      over = true;
    };
  }, [hospital, version]);
  return found?.hospital === hospital ? found.jobs : null;
}

function Jobs({ hospital, jobs, current }: { hospital: string; jobs: readonly JobSummary[]; current: string | null }) {
  if (jobs.length === 0) return null;
  return (
    <section class="card stack tight" aria-label="Jobs">
      <h2>Jobs of this hospital</h2>
      <ul class="picks">
        {jobs.map((each) => (
          <li key={each.id}>
            <button
              type="button"
              class="button quiet"
              aria-pressed={each.id === current}
              onClick={() => {
                sought.job = each.id;
                keepInAddress({ hospital, job: each.id, model: each.model, cohort: null });
              }}
            >
              <span>
                {each.model}
                <span class="hint">{moment(each.created_at)}</span>
              </span>
              <span class={`chip ${each.status.tone}`}>{each.status.words}</span>
            </button>
          </li>
        ))}
      </ul>
    </section>
  );
}
