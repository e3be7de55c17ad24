/** Oversee: health, what serves each hospital, how versions descend from each other, and jobs. */
import { useEffect, useState } from "preact/hooks";
import { call, type Schema } from "../../api/client";
import { catalogueError, hospitals, KINDS, loadCatalogue, type Model, models } from "../../app/catalogue";
import { address } from "../../app/router";
import { moment } from "../../ui/format";
import { Notice, Rejection } from "../../ui/notice";
import { STATES } from "../adapt/job";
import "./oversee.css";

const REFRESH_MS = 10_000;

export default function Oversee() {
  useEffect(() => void loadCatalogue(), []);
  return (
    <div class="oversee">
      <h1>Oversee</h1>
      <Rejection error={catalogueError.value} />
      <Health />
      <Serving />
      <Lineage />
      <Jobs />
    </div>
  );
}

/** What `load` returns, now and every few seconds while the view is open. */
function useRefreshed<T>(load: () => Promise<T>): [T | null, unknown] {
  const [found, setFound] = useState<T | null>(null);
  const [error, setError] = useState<unknown>(null);
  useEffect(() => {
    let over = false;
    let timer: ReturnType<typeof setTimeout>;
    const look = async () => {
      try {
        const next = await load();
        if (over) return;
        setFound(next);
        setError(null);
      } catch (problem) {
        if (!over) setError(problem);
      }
      if (!over) timer = setTimeout(() => void look(), REFRESH_MS);
    };
    void look();
    return () => {
      over = true;
      clearTimeout(timer);
    };
  }, []);
  return [found, error];
}

function Health() {
  const [found, error] = useRefreshed(async () => (await call("get", "/health/ready")).data);
  return (
    <section class="card stack tight" aria-label="Health">
      <h2>Health</h2>
      <Rejection error={error} />
      <ul class="parts">
        {Object.entries(found?.parts ?? {}).map(([name, part]) => (
          <li key={name}>
            <span class={`chip ${part.ok ? "good" : "bad"}`}>{part.ok ? "well" : "not well"}</span>
            <strong>{name}</strong>
            <span class="soft">{part.detail}</span>
          </li>
        ))}
      </ul>
    </section>
  );
}

const shared = (all: readonly Model[]) => all.filter((each) => each.hospital === null);

/** Which version answers the scans of each hospital, by model. */
function Serving() {
  const [rows, setRows] = useState<Record<string, Schema<"ServingView"> | null>>({});
  const offered = shared(models.value);
  useEffect(() => {
    let over = false;
    for (const hospital of hospitals.value) {
      for (const model of offered) {
        const path = { hospital: hospital.id, model: model.name };
        call("get", "/hospitals/{hospital}/serving/{model}", { path }).then(
          ({ data }) => over || setRows((before) => ({ ...before, [`${hospital.id}/${model.name}`]: data })),
          // A model may not be offered to a hospital.
          () => undefined,
        );
      }
    }
    return () => {
      over = true;
    };
  }, [models.value, hospitals.value]);
  return (
    <section class="card stack tight" aria-label="Hospitals">
      <h2>What serves each hospital</h2>
      {hospitals.value.length === 0 && <Notice>No hospital is registered.</Notice>}
      <div class="scroll">
        <table>
          <thead>
            <tr>
              <th scope="col">Hospital</th>
              {offered.map((model) => (
                <th key={model.name} scope="col">{model.name}</th>
              ))}
            </tr>
          </thead>
          <tbody>
            {hospitals.value.map((hospital) => (
              <tr key={hospital.id}>
                <th scope="row">
                  {hospital.name} <span class="hint">{hospital.site ? `member ${hospital.site}` : "outside the federation"}</span>
                </th>
                {offered.map((model) => {
                  const serving = rows[`${hospital.id}/${model.name}`];
                  return (
                    <td key={model.name}>
                      <a href={address("adapt", { hospital: hospital.id, model: model.name })} class="mono">
                        {serving?.artefact ?? "–"}
                      </a>{" "}
                      {serving?.withdrawn && <span class="chip bad">withdrawn</span>}
                    </td>
                  );
                })}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

/** Versions of each model, and the artefacts that were made from each. */
function Lineage() {
  const [found, setFound] = useState<Schema<"VersionDetail">[]>([]);
  const [error, setError] = useState<unknown>(null);
  useEffect(() => {
    const read = async (model: Model) => {
      const { data } = await call("get", "/models/{model}", { path: { model: model.name } });
      const details = data.versions.map((each) =>
        call("get", "/models/{model}/versions/{version}", { path: { model: model.name, version: String(each.version) as never } }),
      );
      return (await Promise.all(details)).map((each) => each.data);
    };
    Promise.all(shared(models.value).map(read)).then((all) => setFound(all.flat()), setError);
  }, [models.value]);
  return (
    <section class="card stack tight" aria-label="Models">
      <h2>Models and what descends from them</h2>
      <Rejection error={error} />
      <ul class="tree">
        {found.map((each) => (
          <li key={each.digest}>
            <Node name={`${each.name}@${each.version}`} version={each} />
            {each.descendants.length > 0 && (
              <ul>
                {each.descendants.map((name) => (
                  <li key={name}>
                    <span class="node mono">{name}</span>
                  </li>
                ))}
              </ul>
            )}
          </li>
        ))}
      </ul>
    </section>
  );
}

function Node({ name, version }: { name: string; version: Schema<"VersionDetail"> }) {
  const kind = models.value.find((each) => each.name === version.name)?.kind ?? "";
  return (
    <span class="node">
      <strong class="mono">{name}</strong> <span class="hint">{`${KINDS[kind] ?? kind}, published ${moment(version.published)}`}</span>{" "}
      {version.withdrawn && <span class="chip bad">withdrawn</span>}
      {version.flagged.length > 0 && <span class="chip warn">from a withdrawn version</span>}
    </span>
  );
}

function Jobs() {
  const [found, error] = useRefreshed(async () => (await call("get", "/jobs", { query: { limit: 20 } })).data.jobs);
  return (
    <section class="card stack tight" aria-label="Jobs">
      <h2>Latest jobs</h2>
      <Rejection error={error} />
      {found?.length === 0 && <p class="hint">No job yet.</p>}
      {found !== null && found.length > 0 && (
        <div class="scroll">
          <table>
            <thead>
              <tr>
                <th scope="col">Job</th>
                <th scope="col">Hospital</th>
                <th scope="col">Model</th>
                <th scope="col">Since</th>
                <th scope="col">State</th>
              </tr>
            </thead>
            <tbody>
              {found.map((job) => (
                <tr key={job.id}>
                  <td>
                    {job.kind === "adaptation" ? (
                      <a href={address("adapt", { hospital: job.hospital, model: job.model, job: job.id })}>adaptation</a>
                    ) : (
                      job.kind.replaceAll("_", " ")
                    )}
                  </td>
                  <td>{job.hospital ?? "–"}</td>
                  <td class="mono">{job.model ?? "–"}</td>
                  <td>{moment(job.created_at)}</td>
                  <td>
                    <span class={`chip ${STATES[job.state]?.tone}`}>{STATES[job.state]?.words ?? job.state}</span>
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </section>
  );
}
