/** Oversee: health, what serves each hospital, how versions descend from each other, and jobs. */
import { useEffect, useMemo, useState } from "preact/hooks";
import { call, Problem, type Schema } from "../../api/client";
import { catalogueError, catalogueLoaded, type Hospital, hospitals, loadCatalogue, type Model, models, unreadable } from "../../app/catalogue";
import { Terms } from "../../app/glossary";
import { RegisterHospital } from "../../app/register";
import { address } from "../../app/router";
import { has } from "../../app/session";
import { moment } from "../../ui/format";
import { Notice, Rejection } from "../../ui/notice";
import { usePage } from "../../ui/pager";
import { Empty, Loading } from "../../ui/states";
import { Table } from "../../ui/table";
import { Drift } from "./drift";
import { readEach } from "../../app/each";
import { useRefreshed } from "../../app/refreshed";
import { Lineage, type Served } from "./lineage";
import "./oversee.css";

const REFRESH_MS = 10_000;
/** What serves a hospital is asked for each of them, so for those of one page. */
const HOSPITALS = 50;

export default function Oversee() {
  useEffect(() => void loadCatalogue(), []);
  const offered = models.value.filter((each) => each.hospital === null);
  const [part, setPart] = useState("");
  const found = useMemo(() => matching(hospitals.value, part), [hospitals.value, part]);
  const { shown, pager } = usePage(found, HOSPITALS, "Pages of hospitals");
  const first = shown[0];
  // The same rows are the same list: what serves them is asked once.
  const listed = useMemo(() => shown, [found, first, shown.length]);
  const [rows, failure] = useServing(listed, offered);
  // A federation's operator sees what is published, and nothing of a hospital.
  const isOfHospitals = has("reader");
  return (
    <div class="oversee">
      <h1>Oversee</h1>
      <Rejection error={catalogueError.value} onRetry={() => void loadCatalogue()} />
      <Health />
      {isOfHospitals && (
        <Hospitals rows={rows} failure={failure} offered={offered} listed={listed}>
          {hospitals.value.length > HOSPITALS && (
            <input
              type="search"
              placeholder="A part of a hospital's name"
              aria-label="Find a hospital"
              value={part}
              onInput={(event) => setPart(event.currentTarget.value)}
            />
          )}
          {pager}
        </Hospitals>
      )}
      <Lineage served={servedOf(rows, offered)} />
      {unreadable.value.map((each) => (
        <Notice key={each.name} tone="bad" title={`${each.name} cannot be read`}>
          {each.detail}
        </Notice>
      ))}
      {isOfHospitals && <Drift hospitals={listed} />}
      {isOfHospitals && <Jobs />}
    </div>
  );
}

function matching(all: readonly Hospital[], part: string): readonly Hospital[] {
  const wanted = part.trim().toLowerCase();
  return wanted === "" ? all : all.filter((each) => `${each.name} ${each.id} ${each.site ?? ""}`.toLowerCase().includes(wanted));
}

/** A service that is not ready answers 503 with the same document. */
async function readHealth(): Promise<Schema<"Ready">> {
  try {
    return (await call("get", "/health/ready")).data;
  } catch (error) {
    if (error instanceof Problem && error.status === 503 && error.members.parts) return error.members as Schema<"Ready">;
    throw error;
  }
}

function Health() {
  const [found, error] = useRefreshed(readHealth, REFRESH_MS);
  return (
    <section class="card stack tight" aria-label="Health">
      <h2>Health</h2>
      <Rejection error={error} />
      {found === null && !error && <Loading />}
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

/** Which version answers the scans of each hospital, by `hospital/model`: undefined until it was read, null without one. */
type Rows = Readonly<Record<string, Schema<"ServingView"> | null>>;

interface Pair {
  hospital: string;
  model: string;
}

const keyOf = ({ hospital, model }: Pair) => `${hospital}/${model}`;

const pairsOf = (listed: readonly Hospital[], offered: readonly Model[]): Pair[] =>
  listed.flatMap((hospital) => offered.map((model) => ({ hospital: hospital.id, model: model.name })));

/** The rows, and why some of them could not be read. */
function useServing(listed: readonly Hospital[], offered: readonly Model[]): [Rows, unknown] {
  const [rows, setRows] = useState<Rows>({});
  const [failure, setFailure] = useState<unknown>(null);
  useEffect(() => {
    const ending = new AbortController();
    const { signal } = ending;
    setFailure(null);
    void readEach(pairsOf(listed, offered), signal, async (path) => {
      try {
        const row = await servingOf(path, signal);
        setRows((before) => ({ ...before, [keyOf(path)]: row }));
      } catch (error) {
        if (!signal.aborted) setFailure(error);
      }
    });
    return () => ending.abort();
  }, [models.value, listed]);
  return [rows, failure];
}

/** A model may not be offered to a hospital. */
async function servingOf(path: Pair, signal: AbortSignal): Promise<Schema<"ServingView"> | null> {
  try {
    return (await call("get", "/hospitals/{hospital}/serving/{model}", { path, signal })).data;
  } catch (error) {
    if (error instanceof Problem && error.status === 404) return null;
    throw error;
  }
}

function servedOf(rows: Rows, offered: readonly Model[]): Served {
  const found = new Map<string, string[]>();
  const names = new Map(hospitals.value.map((each) => [each.id, each.name]));
  for (const row of Object.values(rows)) {
    const name = row && names.get(row.hospital);
    if (row?.artefact && name !== undefined && name !== null) found.set(row.artefact, [...(found.get(row.artefact) ?? []), name]);
  }
  const isWhole = catalogueLoaded.value && has("reader") && pairsOf(hospitals.value, offered).every((pair) => keyOf(pair) in rows);
  return { by: found, isWhole };
}

function Hospitals(given: {
  rows: Rows;
  failure: unknown;
  offered: readonly Model[];
  listed: readonly Hospital[];
  children: preact.ComponentChildren;
}) {
  const { rows, failure, offered, listed, children } = given;
  return (
    <section class="card stack tight" aria-label="Hospitals">
      <div class="row">
        <h2>
          <Terms text="What serves each hospital" />
        </h2>
        <span class="grow" />
        <RegisterHospital />
      </div>
      <Rejection error={failure} />
      {!catalogueLoaded.value && !catalogueError.value && <Loading what="the hospitals" />}
      {catalogueLoaded.value && hospitals.value.length === 0 && (
        <Empty title="No hospital is registered">
          {has("admin") ? "Register one: its scans are answered by its own version." : "An admin registers hospitals."}
        </Empty>
      )}
      {children}
      {hospitals.value.length > 0 && (
        <Table
          rows={listed}
          keyOf={(hospital) => hospital.id}
          columns={[
            {
              title: "Hospital",
              head: true,
              cell: ({ name, site }) => (
                <>
                  {name}{" "}
                  <span class="hint">
                    <Terms text={site ? `member ${site}` : "outside the federation"} />
                  </span>
                </>
              ),
            },
            ...offered.map((model) => ({
              title: model.name,
              cell: ({ id }: { id: string }) => (
                <ServedCell hospital={id} model={model} serving={rows[keyOf({ hospital: id, model: model.name })]} />
              ),
            })),
          ]}
        />
      )}
    </section>
  );
}

function ServedCell({ hospital, model, serving }: { hospital: string; model: Model; serving: Rows[string] | undefined }) {
  if (serving === undefined) return <span class="soft">unknown</span>;
  if (!serving?.artefact) return <>–</>;
  return (
    <span class="row">
      {model.adaptable ? (
        <a href={address("adapt", { hospital, model: model.name })} class="mono">
          {serving.artefact}
        </a>
      ) : (
        <span class="mono">{serving.artefact}</span>
      )}
      {serving.withdrawn && <span class="chip bad">withdrawn</span>}
      {serving.flagged.length > 0 && <span class="chip warn">from a withdrawn version</span>}
      {serving.assignment?.override && <span class="chip warn">against the gate</span>}
    </span>
  );
}

function Jobs() {
  const [found, error] = useRefreshed(async () => (await call("get", "/jobs", { query: { limit: 20 } })).data.jobs, REFRESH_MS);
  return (
    <section class="card stack tight" aria-label="Jobs">
      <h2>Latest jobs</h2>
      <Rejection error={error} />
      {found === null && !error && <Loading what="the jobs" />}
      {found?.length === 0 && <Empty title="No job yet">Adaptations, and scans that take long, are listed here.</Empty>}
      {found !== null && found.length > 0 && (
        <Table
          rows={found}
          keyOf={(job) => job.id}
          columns={[
            {
              title: "Job",
              cell: (job) =>
                job.kind === "adaptation" ? (
                  <a href={address("adapt", { hospital: job.hospital, model: job.model, job: job.id })}>adaptation</a>
                ) : (
                  job.kind.replaceAll("-", " ")
                ),
            },
            { title: "Hospital", cell: (job) => job.hospital ?? "–" },
            { title: "Model", cell: (job) => <span class="mono">{job.model ?? "–"}</span> },
            { title: "Since", cell: (job) => moment(job.created_at) },
            {
              title: "State",
              cell: (job) => <span class={`chip ${job.status.tone}`}>{job.status.words}</span>,
            },
          ]}
        />
      )}
    </section>
  );
}
