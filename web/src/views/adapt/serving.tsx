/** Which version serves the hospital: decide, take a decision back, and see what served when. */
import { useEffect, useState } from "preact/hooks";
import { call, Problem, type Schema } from "../../api/client";
import { Terms } from "../../app/glossary";
import { has, session } from "../../app/session";
import { Select } from "../../ui/controls";
import { Dialog } from "../../ui/dialog";
import { moment } from "../../ui/format";
import { Notice, Rejection } from "../../ui/notice";
import { Loading } from "../../ui/states";
import type { Job } from "./following";

type Serving = Schema<"ServingView">;
type Entry = Schema<"Entry">;
type Precision = Entry["precision"];
const BECAUSE: Record<Serving["because"], string> = {
  assigned: "by a decision",
  kept: "the newest version when its first scan came; no decision was made",
  newest: "the newest version; no scan was answered yet",
  nothing: "no version of the model can serve, or none does before it is assigned",
};

const PRECISIONS: { value: Precision; label: string }[] = [
  { value: "float32", label: "float32, as trained" },
  { value: "int8", label: "int8, faster on a processor" },
  { value: "float16", label: "float16, faster on a GPU" },
];

/** The precisions in which the newest versions of the federation, or of this hospital, have a graph (`NAME.int8`). */
async function precisionsFor(hospital: string): Promise<Precision[]> {
  const limit = 1000;
  const pages = await Promise.all([
    call("get", "/lineage", { query: { adapted: false, limit } }),
    call("get", "/lineage", { query: { hospital, limit } }),
  ]);
  const names = pages.flatMap(({ data }) => data.versions.map(({ name }) => name));
  return PRECISIONS.map(({ value }) => value).filter((each) => names.some((name) => name.endsWith(`.${each}`)));
}

/** `reasons`: why the gate rejected the version. `precision` keeps the version that serves. */
type Decision = {
  kind: "assign" | "newer" | "override" | "back" | "precision";
  version: string;
  reasons?: readonly string[];
  /** Whether the gate rejected it, or gave no verdict. */
  against?: boolean;
  precision?: Precision;
};

export function ServingPanel(given: { hospital: string; name: string; model: string; job: Job | null }) {
  const { hospital, name, model, job } = given;
  const [serving, setServing] = useState<Serving | null>(null);
  const [tag, setTag] = useState<string | null>(null);
  const [entries, setEntries] = useState<Entry[]>([]);
  const [graphs, setGraphs] = useState<Precision[]>([]);
  const [error, setError] = useState<unknown>(null);
  const [decision, setDecision] = useState<Decision | null>(null);
  const load = async () => {
    try {
      const path = { hospital, model };
      const found = await call("get", "/hospitals/{hospital}/serving/{model}", { path });
      setServing(found.data);
      setTag(found.headers.get("ETag"));
      setEntries((await call("get", "/hospitals/{hospital}/serving/{model}/history", { path })).data.entries);
      if (has("approver")) setGraphs(await precisionsFor(hospital));
      setError(null);
    } catch (found) {
      setError(found);
    }
  };
  useEffect(() => void load(), [hospital, model]);
  const candidate = job?.candidate?.reference;
  const passed = (job?.gate as { passed?: boolean } | null | undefined)?.passed === true;
  const canAssign = candidate !== undefined && serving?.artefact !== candidate;
  const decided = serving?.assignment ?? null;
  const newer = serving?.newer ?? null;
  const returnsTo = serving?.returns_to ?? null;
  const atFirst = serving !== null && entries.length > 0 && returnsTo === null;
  return (
    <section class="card stack" aria-label="Serving">
      <h2>What serves {name}</h2>
      <Rejection error={error} />
      {serving === null && !error && <Loading />}
      {serving && (
        <p>
          <strong class="mono">{serving.artefact ?? "nothing"}</strong>{" "}
          {decided && decided.precision !== "float32" && <span class="chip">in {decided.precision}</span>}{" "}
          <span class="soft">
            <Terms text={BECAUSE[serving.because]} />
          </span>
        </p>
      )}
      {newer && (
        <Notice>
          <strong class="mono">{newer}</strong> {serving?.artefact ? "was published since" : "is the newest"}. It serves {name} only once it is assigned.
        </Notice>
      )}
      {serving?.withdrawn && <Notice tone="bad">This version was withdrawn. Scans are rejected until another is assigned.</Notice>}
      {serving !== null && serving.flagged.length > 0 && (
        <Notice tone="warn">It descends from {serving.flagged.join(", ")}, withdrawn since. Its answers carry a warning.</Notice>
      )}
      {!has("approver") && <p class="hint">
          <Terms text="An approver decides which version serves." />
        </p>}
      {has("approver") && (canAssign || newer || returnsTo || atFirst) && (
        <div class="row">
          {canAssign && (
            <button
              type="button"
              class={`button ${passed ? "primary" : "danger"}`}
              onClick={() =>
                setDecision({ kind: passed ? "assign" : "override", version: candidate, reasons: reasonsOf(job), against: !passed })
              }
            >
              {passed ? "Assign the candidate" : "Assign against the gate"}
            </button>
          )}
          {newer && (
            <button type="button" class="button" onClick={() => setDecision({ kind: "newer", version: newer })}>
              Assign the newer version
            </button>
          )}
          {decided && !decided.by_default && !serving?.withdrawn && (graphs.length > 0 || decided.precision !== "float32") && (
            <button
              type="button"
              class="button"
              onClick={() =>
                setDecision({ kind: "precision", version: decided.artefact, against: decided.override, precision: decided.precision })
              }
            >
              Change the precision
            </button>
          )}
          {(returnsTo || atFirst) && (
            <button
              type="button"
              class="button"
              disabled={returnsTo === null}
              aria-describedby={atFirst ? "at-first" : undefined}
              onClick={() => setDecision({ kind: "back", version: returnsTo! })}
            >
              Roll back
            </button>
          )}
          {atFirst && (
            <span class="hint" id="at-first">
              This is the first version that served {name}.
            </span>
          )}
        </div>
      )}
      {serving !== null && <History entries={entries} serving={serving} />}
      {decision && (
        <Decide
          decision={decision}
          hospital={hospital}
          model={model}
          graphs={graphs}
          serving={serving?.artefact ?? "nothing"}
          tag={tag}
          onStale={load}
          onClose={() => {
            setDecision(null);
            void load();
          }}
        />
      )}
    </section>
  );
}

/** What the gate said against the job's candidate. */
const reasonsOf = (job: Job | null): readonly string[] =>
  job?.sections.flatMap((each) => (each.body?.form === "checks" && each.tone === "bad" ? each.reasons : [])) ?? [];

function History({ entries, serving }: { entries: readonly Entry[]; serving: Serving }) {
  if (entries.length === 0) {
    const next = serving.because === "nothing" ? "scans are refused until a version is assigned" : "the newest version answers the first scan";
    return <p class="hint">No scan and no decision yet: {next}.</p>;
  }
  return (
    <ol class="timeline" aria-label="History">
      {[...entries].reverse().map((entry, index) => (
        <li key={entry.sequence} class={index === 0 ? "now" : ""}>
          <div class="row">
            <strong class="mono">{entry.artefact}</strong>
            {index === 0 && (serving.withdrawn ? <span class="chip bad">withdrawn</span> : <span class="chip good">serves now</span>)}
            {entry.precision !== "float32" && <span class="chip">{entry.precision}</span>}
            {entry.by_default && <span class="chip">by default</span>}
            {entry.restores !== null && <span class="chip">rolled back</span>}
            {entry.override && <span class="chip warn">against the gate</span>}
          </div>
          <div class="hint">
            {moment(entry.at)}, by {entry.actor}
          </div>
          <div>{entry.reason}</div>
        </li>
      ))}
    </ol>
  );
}

function Decide(given: {
  decision: Decision;
  hospital: string;
  model: string;
  /** Precisions beside float32 in which there are graphs. */
  graphs: readonly Precision[];
  /** What serves now. */
  serving: string;
  tag: string | null;
  /** Called where another person decided meanwhile. */
  onStale: () => Promise<void>;
  onClose: () => void;
}) {
  const { decision, hospital, model, tag } = given;
  const isKnown = session.value?.authenticated ?? false;
  const [reason, setReason] = useState("");
  const [actor, setActor] = useState("");
  const [confirmed, setConfirmed] = useState("");
  const [precision, setPrecision] = useState<Precision>(decision.precision ?? "float32");
  const [error, setError] = useState<unknown>(null);
  const isOverride = decision.against === true;
  const isReady = reason.trim() !== "" && (isKnown || actor.trim() !== "") && (!isOverride || confirmed === hospital);
  const who = isKnown ? {} : { actor: actor.trim() };
  const path = { hospital, model };
  const headers: Record<string, string> = tag ? { "If-Match": tag } : {};
  const submit = async (event: Event) => {
    event.preventDefault();
    try {
      if (decision.kind === "back") {
        const json = { ...who, reason };
        await call("post", "/hospitals/{hospital}/serving/{model}/rollback", { path, headers, json });
      } else {
        const json = { ...who, reason, version: decision.version, precision, override: isOverride };
        await call("put", "/hospitals/{hospital}/serving/{model}", { path, headers, json });
      }
      given.onClose();
    } catch (found) {
      if (found instanceof Problem && found.status === 412) await given.onStale();
      setError(found);
    }
  };
  const offered = PRECISIONS.filter(({ value }) => value === "float32" || value === decision.precision || given.graphs.includes(value));
  const title = {
    assign: "Assign the candidate",
    newer: "Assign the newer version",
    override: "Assign against the gate",
    back: "Roll back",
    precision: "Change the precision",
  }[decision.kind];
  return (
    <Dialog title={title} onClose={given.onClose}>
      <form class="stack" onSubmit={(event) => void submit(event)}>
        {isOverride && (
          <Notice tone="bad" title="The gate rejected this version, or gave no verdict">
            {decision.reasons !== undefined && decision.reasons.length > 0 && (
              <ul class="reasons">
                {decision.reasons.map((each) => (
                  <li key={each}>{each}</li>
                ))}
              </ul>
            )}
            Scans of {hospital} will be answered by it. The log records that the gate was overridden, by whom and why.
          </Notice>
        )}
        <p>
          {decision.kind === "back"
            ? `${decision.version}, which served ${hospital} before, serves again from now on.`
            : `${decision.version} serves ${hospital} for ${model} from now on.`}
        </p>
        {decision.kind !== "back" && offered.length > 1 && (
          <Select
            label="Precision"
            value={precision}
            options={offered}
            hint="The numbers that the model computes in. A graph in fewer bits was checked to draw the same masks."
            onChange={setPrecision}
          />
        )}
        {!isKnown && (
          <label class="field">
            <span class="label">Your name</span>
            <input type="text" value={actor} onInput={(event) => setActor(event.currentTarget.value)} required />
          </label>
        )}
        <label class="field">
          <span class="label">Reason</span>
          <textarea value={reason} onInput={(event) => setReason(event.currentTarget.value)} required />
        </label>
        {isOverride && (
          <label class="field">
            <span class="label">Type {hospital} to confirm</span>
            <input type="text" value={confirmed} onInput={(event) => setConfirmed(event.currentTarget.value)} />
          </label>
        )}
        <Rejection error={error} />
        {error instanceof Problem && error.status === 412 && (
          <p>
            <span class="mono">{given.serving}</span> serves now. Decide again to replace it, or close this.
          </p>
        )}
        <div class="row">
          <button type="submit" class={`button ${isOverride ? "danger" : "primary"}`} disabled={!isReady}>
            {title}
          </button>
        </div>
      </form>
    </Dialog>
  );
}
