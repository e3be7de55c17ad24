/** Drift: how far a hospital's scans pick other entries of a pool than the federation's training images. */
import { useEffect, useState } from "preact/hooks";
import { call, type Schema } from "../../api/client";
import { type Hospital, models } from "../../app/catalogue";
import { Terms } from "../../app/glossary";
import { day, percent } from "../../ui/format";
import { Rejection } from "../../ui/notice";
import { Empty, Loading } from "../../ui/states";
import { Table } from "../../ui/table";
import { readEach } from "../../app/each";

type Usage = Schema<"VersionUsage">;

interface Row {
  hospital: Hospital;
  usage: Usage;
}

export function Drift({ hospitals }: { hospitals: readonly Hospital[] }) {
  const [rows, setRows] = useState<readonly Row[] | null>(null);
  const [error, setError] = useState<unknown>(null);
  const pools = models.value.filter((model) => model.hospital === null && model.kind === "ssf-pool");
  useEffect(() => {
    const ending = new AbortController();
    const { signal } = ending;
    const pairs = hospitals.flatMap((hospital) => pools.map((model) => ({ hospital, model })));
    const found = new Map<(typeof pairs)[number], Row[]>();
    readEach(pairs, signal, async (pair) => {
      const { hospital, model } = pair;
      const path = { hospital: hospital.id, model: model.name };
      const { data } = await call("get", "/hospitals/{hospital}/serving/{model}/key-usage", { path, signal });
      found.set(pair, data.versions.map((usage) => ({ hospital, usage })));
    }).then(
      () => signal.aborted || setRows(pairs.flatMap((pair) => found.get(pair) ?? [])),
      (problem) => signal.aborted || setError(problem),
    );
    return () => ending.abort();
  }, [models.value, hospitals]);
  if (pools.length === 0) return null;
  const largest = Math.max(0.1, ...(rows ?? []).flatMap(({ usage }) => usage.days.map((each) => each.drift ?? 0)));
  return (
    <section class="card stack tight" aria-label="Drift">
      <h2>Drift of key usage</h2>
      <p class="hint">
        <Terms text="A model with a pool lets every scan pick entries of it by key. 0: this hospital's scans pick as the federation's training images did. 1: they have no entry in common. Of few scans the figure is too large." />
      </p>
      <Rejection error={error} />
      {rows === null && !error && <Loading />}
      {rows?.length === 0 && <Empty title="No scan yet">No scan of a hospital was answered by such a model.</Empty>}
      {rows !== null && rows.length > 0 && (
        <Table
          rows={rows}
          keyOf={({ hospital, usage }) => `${hospital.id} ${usage.digest}`}
          columns={[
            { title: "Hospital", head: true, cell: ({ hospital }) => hospital.name },
            { title: "Version", cell: ({ usage }) => <span class="mono">{usage.artefact}</span> },
            { title: "Scans in 30 days", number: true, cell: ({ usage }) => usage.recent_scans },
            { title: "Drift", number: true, cell: ({ usage }) => usage.drift?.toFixed(3) ?? "–" },
            { title: `By day, 0 to ${largest.toFixed(2)}`, cell: ({ usage }) => <Days usage={usage} largest={largest} /> },
            { title: "Entries picked", cell: ({ usage }) => <Entries usage={usage} /> },
          ]}
        />
      )}
    </section>
  );
}

const SIZE = { width: 170, height: 40 };

/** The drift of each day with scans, as a line below `largest`; in words for a screen reader. */
function Days({ usage, largest }: { usage: Usage; largest: number }) {
  const days = usage.days.filter((each) => each.drift !== null).map((each) => ({ at: Date.parse(each.day), drift: each.drift!, day: each.day }));
  const [first, last] = [days[0], days.at(-1)];
  if (!first || !last) return <>–</>;
  const x = (at: number) => (last.at === first.at ? SIZE.width / 2 : 4 + ((SIZE.width - 8) * (at - first.at)) / (last.at - first.at));
  const y = (drift: number) => SIZE.height - 5 - ((SIZE.height - 10) * drift) / largest;
  const words = `From ${first.drift.toFixed(3)} on ${day(first.day)} to ${last.drift.toFixed(3)} on ${day(last.day)}; at most ${Math.max(...days.map((each) => each.drift)).toFixed(3)}`;
  return (
    <svg class="days" width={SIZE.width} height={SIZE.height} viewBox={`0 0 ${SIZE.width} ${SIZE.height}`} role="img" aria-label={words}>
      <path class="axis" d={`M0,${SIZE.height - 5} H${SIZE.width}`} />
      <polyline points={days.map((each) => `${x(each.at)},${y(each.drift)}`).join(" ")} />
      {days.map((each) => (
        <circle key={each.day} cx={x(each.at)} cy={y(each.drift)} r="2.5">
          <title>{`${day(each.day)}: ${each.drift.toFixed(3)}`}</title>
        </circle>
      ))}
    </svg>
  );
}

/** Shares of the entries over all days with scans, beside the federation's. */
function Entries({ usage }: { usage: Usage }) {
  const scans = usage.days.reduce((sum, each) => sum + each.scans, 0);
  const here = (entry: number) => usage.days.reduce((sum, each) => sum + each.scans * each.shares[entry]!, 0) / scans;
  const entries = [...(usage.days[0]?.shares.keys() ?? [])];
  return (
    <details>
      <summary>{entries.length} entries</summary>
      <Table
        class="entries"
        rows={entries}
        keyOf={(entry) => entry}
        columns={[
          { title: "Entry", head: true, cell: (entry) => entry },
          { title: "Here", number: true, cell: (entry) => percent(here(entry), 1) },
          { title: "Federation", number: true, cell: (entry) => (usage.federation ? percent(usage.federation[entry]!, 1) : "–") },
        ]}
      />
    </details>
  );
}
