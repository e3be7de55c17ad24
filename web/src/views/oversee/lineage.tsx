/** Versions as a graph of what was made from what, who is served which, and the same as a table. */
import { useEffect, useState } from "preact/hooks";
import { call, pagesOf } from "../../api/client";
import { hospitals } from "../../app/catalogue";
import { isEmpty, NoModel } from "../../app/empty";
import { Terms } from "../../app/glossary";
import { address } from "../../app/router";
import { has } from "../../app/session";
import { Select } from "../../ui/controls";
import { moment } from "../../ui/format";
import { Rejection } from "../../ui/notice";
import { Loading } from "../../ui/states";
import { Table } from "../../ui/table";
import { graphOf, type Graph, type Node, referenceOf, type Version } from "./layout";
import { Scores } from "./scores";

export interface Served {
  /** Names of the hospitals that a version (`name@version`) serves now. */
  by: ReadonlyMap<string, readonly string[]>;
  /** Whether all were read: a version without a hospital has none. */
  isWhole: boolean;
}

/** Of each name, how many of the newest versions are drawn; those that serve are always drawn. */
const RECENT = 4;
const NODE = { width: 260, line: 20, margin: 8 };
const GAP = { across: 60, down: 20 };
/** Characters that a line of a node has room for. */
const LONGEST = { reference: 28, line: 36, serves: 34 };

export function Lineage({ served }: { served: Served }) {
  const [versions, setVersions] = useState<readonly Version[] | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [version, setVersion] = useState(0);
  const [root, setRoot] = useState("");
  const [older, setOlder] = useState(false);
  const [chosen, setChosen] = useState("");
  const [isWhole, setWhole] = useState(true);
  const [hospital, setHospital] = useState("");
  useEffect(() => {
    let over = false;
    read(hospital).then((found) => {
      if (over) return;
      setVersions(found.versions);
      setWhole(found.isWhole);
    }, setError);
    return () => {
      over = true;
    };
  }, [hospital, version, isEmpty()]);
  if (error) return <Models><Rejection error={error} onRetry={() => (setError(null), setVersion(version + 1))} /></Models>;
  if (versions === null) return <Models><Loading what="the versions" /></Models>;
  const whole = graphOf(versions);
  if (whole.nodes.length === 0) return <Models><NoModel lacks="No model" /></Models>;
  const roots = [...new Set(whole.nodes.filter((node) => node.version.hospital === null).map((node) => node.version.name))];
  const family = root === "" ? null : descendantsOf(whole, root);
  const graph = graphOf(versions, (node) => (family?.has(node.reference) ?? true) && (older || isCurrent(node, whole, served)));
  const node = whole.nodes.find((each) => each.reference === chosen);
  return (
    <Models>
      <div class="row lineage-choices">
        {roots.length > 1 && (
          <Select
            label="Models"
            value={root}
            options={[{ value: "", label: "All" }, ...roots.map((name) => ({ value: name, label: name }))]}
            onChange={setRoot}
          />
        )}
        {whole.nodes.some((each) => !isCurrent(each, whole, served)) && (
          <label class="check">
            <input type="checkbox" checked={older} onChange={(event) => setOlder(event.currentTarget.checked)} />
            Older versions, which serve no hospital
          </label>
        )}
        {!isWhole && (
          <Select
            label="Versions adapted to"
            value={hospital}
            options={[
              { value: "", label: "No hospital" },
              ...hospitals.value.map((each) => ({ value: each.id, label: each.name })),
            ]}
            hint="There are too many for one picture: those of one hospital are drawn."
            onChange={setHospital}
          />
        )}
      </div>
      <div class="scroll">
        <Drawing graph={graph} served={served} chosen={chosen} onChoose={setChosen} />
      </div>
      {node ? <Details node={node} served={served} /> : <p class="hint"><Terms text="Choose a version for its origin and its report." /></p>}
      <details>
        <summary>The same as a table</summary>
        <Versions graph={graph} served={served} />
      </details>
    </Models>
  );
}

/** The lineage as a whole, or where it has more than a page, the federation's and that of one hospital. */
async function read(hospital: string): Promise<{ versions: readonly Version[]; isWhole: boolean }> {
  const { data: first } = await call("get", "/lineage", { query: { limit: 500 } });
  if (first.next === null) return { versions: first.versions, isWhole: true };
  const shared = pagesOf((cursor) => call("get", "/lineage", { query: { adapted: false, limit: 1000, ...cursor } }));
  const own = hospital === "" ? [] : pagesOf((cursor) => call("get", "/lineage", { query: { hospital, limit: 1000, ...cursor } }));
  const pages = (await Promise.all([shared, own])).flat();
  return { versions: pages.flatMap((page) => page.versions), isWhole: false };
}

function Models({ children }: { children: preact.ComponentChildren }) {
  return (
    <section class="card stack tight" aria-label="Models">
      <h2>
        <Terms text="Models and what descends from them" />
      </h2>
      {children}
    </section>
  );
}

/** A name's versions, and everything that was made from one of them. */
function descendantsOf(graph: Graph, name: string): Set<string> {
  const found = new Set(graph.nodes.filter((node) => node.version.name === name).map((node) => node.reference));
  for (let size = 0; size < found.size; ) {
    size = found.size;
    for (const node of graph.nodes) if (node.parents.some((parent) => found.has(parent))) found.add(node.reference);
  }
  return found;
}

function isCurrent(node: Node, graph: Graph, served: Served): boolean {
  const newer = graph.nodes.filter((each) => each.version.name === node.version.name && each.version.version > node.version.version);
  return newer.length < RECENT || served.by.has(node.reference);
}

type State = "withdrawn" | "flagged" | "serving" | "idle";

function stateOf(node: Node, served: Served): State {
  if (node.version.withdrawn) return "withdrawn";
  if (node.version.flagged.length > 0) return "flagged";
  return served.by.has(node.reference) ? "serving" : "idle";
}

const STATES: Record<State, string> = { withdrawn: "withdrawn", flagged: "from a withdrawn version", serving: "", idle: "" };

function wordsOf({ version }: Node): string {
  return version.hospital === null ? version.summary : `adapted to ${version.hospital}`;
}

function servesOf(node: Node, served: Served): string {
  const hospitals = served.by.get(node.reference) ?? [];
  if (hospitals.length === 0) return served.isWhole ? "serves no hospital" : "serves: unknown";
  return `serves ${hospitals.slice(0, 2).join(", ")}${hospitals.length > 2 ? ` and ${hospitals.length - 2} more` : ""}`;
}

/** A text in lines of at most `most` characters, broken where it may be. */
export function wrapped(text: string, most: number): string[] {
  const lines = [""];
  for (const part of text.split(/(?<=[ .@_-])/).flatMap((each) => each.match(new RegExp(`.{1,${most}}`, "gu")) ?? [])) {
    if ((lines.at(-1)! + part).trimEnd().length > most) lines.push("");
    lines[lines.length - 1] += part;
  }
  return lines.map((each) => each.trim()).filter((each) => each !== "");
}

/** What a node says, line by line. */
function linesOf(node: Node, served: Served): { text: string; kind: string | undefined }[] {
  const status = STATES[stateOf(node, served)];
  return [
    ...wrapped(node.reference, LONGEST.reference).map((text) => ({ text, kind: "name" })),
    ...wrapped(status || wordsOf(node), LONGEST.line).map((text) => ({ text, kind: status ? "status" : undefined })),
    ...wrapped(servesOf(node, served), LONGEST.serves).map((text) => ({ text, kind: "serves" })),
  ];
}

function Drawing(given: { graph: Graph; served: Served; chosen: string; onChoose: (reference: string) => void }) {
  const { graph, served, chosen, onChoose } = given;
  const width = graph.columns * (NODE.width + GAP.across) - GAP.across;
  const most = Math.max(0, ...graph.nodes.map((node) => linesOf(node, served).length));
  const box = most * NODE.line + 2 * NODE.margin;
  const height = graph.rows * (box + GAP.down) - GAP.down;
  const left = (node: Node) => node.column * (NODE.width + GAP.across);
  const top = (node: Node) => node.row * (box + GAP.down);
  const byReference = new Map(graph.nodes.map((node) => [node.reference, node]));
  return (
    <svg class="lineage" width={width + 4} height={height + 4} viewBox={`-2 -2 ${width + 4} ${height + 4}`} role="group" aria-label="Lineage">
      {graph.nodes.flatMap((node) =>
        node.parents.map((parent) => {
          const from = byReference.get(parent)!;
          const [x, y] = [left(from) + NODE.width, top(from) + box / 2];
          const [u, v] = [left(node), top(node) + box / 2];
          const bend = GAP.across / 2;
          return (
            <path
              key={`${parent} ${node.reference}`}
              class={`edge ${from.version.withdrawn ? "withdrawn" : ""}`}
              d={`M${x},${y} C${x + bend},${y} ${u - bend},${v} ${u - 6},${v} m-4,-4 l5,4 l-5,4`}
            />
          );
        }),
      )}
      {graph.nodes.map((node) => {
        const state = stateOf(node, served);
        const [words, serves] = [wordsOf(node), servesOf(node, served)];
        const status = STATES[state];
        return (
          <g
            key={node.reference}
            class={`node ${state}`}
            transform={`translate(${left(node)} ${top(node)})`}
            role="button"
            tabindex={0}
            aria-pressed={node.reference === chosen}
            aria-label={[node.reference, words, status, serves].filter(Boolean).join(", ")}
            onClick={() => onChoose(node.reference)}
            onKeyDown={(event) => {
              if (event.key !== "Enter" && event.key !== " ") return;
              event.preventDefault();
              onChoose(node.reference);
            }}
          >
            <title>{node.reference}</title>
            <rect width={NODE.width} height={box} rx="8" />
            {linesOf(node, served).map(({ text, kind }, i) => (
              <text key={i} x="12" y={NODE.margin + (i + 0.75) * NODE.line} class={kind}>
                {text}
              </text>
            ))}
          </g>
        );
      })}
    </svg>
  );
}

/** Where a version comes from, who is served it, and the report of the federation's run. */
function Details({ node, served }: { node: Node; served: Served }) {
  const { version, reference } = node;
  return (
    <div class="notice" aria-live="polite">
      <strong class="mono">{reference}</strong>
      <p>
        Published {moment(version.published)}, made by {version.method}
        {version.parents.length > 0 && ` from ${version.parents.join(", ")}`}
        {version.parts.length > 0 && `, composed of ${version.parts.join(", ")}`}.
      </p>
      {version.weights && <p>{`Began with weights from elsewhere: ${version.weights}.`}</p>}
      {version.withdrawn && (
        <p>
          Withdrawn {moment(version.withdrawn.time)} by {version.withdrawn.actor}: {version.withdrawn.reason}
        </p>
      )}
      {version.flagged.length > 0 && <p>Descends from {version.flagged.join(", ")}, withdrawn since.</p>}
      <p>{`Now it serves ${served.by.get(reference)?.join(", ") ?? (served.isWhole ? "no hospital" : "unknown hospitals")}.`}</p>
      <p class="mono soft">{version.digest}</p>
      <Scores version={version} />
      <div class="row">
        <Report version={version} words="Report of the federation" />
        {has("reader") && (
          <a class="button small" href={`${pathOf(version)}/card.html`} target="_blank" rel="noreferrer">
            Card
            <span class="visually-hidden"> of {reference}</span>
          </a>
        )}
        {version.hospital !== null && has("reader") && (
          <a class="button small" href={address("adapt", { hospital: version.hospital, model: node.parents[0]?.split("@")[0], job: version.run })}>
            The job that made it
          </a>
        )}
      </div>
    </div>
  );
}

const pathOf = (version: Version): string => `models/${encodeURIComponent(version.name)}/versions/${version.version}`;

function Report({ version, words }: { version: Version; words: string }) {
  if (!version.report) return null;
  return (
    <a class="button small" href={`${pathOf(version)}/report`} target="_blank" rel="noreferrer">
      {words}
      <span class="visually-hidden"> for {referenceOf(version)}</span>
    </a>
  );
}

function Versions({ graph, served }: { graph: Graph; served: Served }) {
  return (
    <Table
      rows={graph.nodes}
      keyOf={(node) => node.reference}
      columns={[
        {
          title: "Version",
          head: true,
          cell: (node) => (
            <>
              <span class="mono">{node.reference}</span>
              <div class="hint">{wordsOf(node)}</div>
            </>
          ),
        },
        { title: "Made from", cell: (node) => <span class="mono">{node.parents.join(", ") || "–"}</span> },
        { title: "Published", cell: (node) => moment(node.version.published) },
        { title: "State", cell: (node) => <StateChip state={stateOf(node, served)} /> },
        { title: "Serves", cell: (node) => served.by.get(node.reference)?.join(", ") ?? (served.isWhole ? "–" : "unknown") },
        { title: "Report", cell: (node) => (node.version.report ? <Report version={node.version} words="Report" /> : "–") },
      ]}
    />
  );
}

function StateChip({ state }: { state: State }) {
  if (STATES[state] === "") return <>in force</>;
  return <span class={`chip ${state === "withdrawn" ? "bad" : "warn"}`}>{STATES[state]}</span>;
}
