/** Dice of a version, or accuracy, by model and label, each with the patients that it rests on. */
import { useEffect, useState } from "preact/hooks";
import { call } from "../../api/client";
import { Rejection } from "../../ui/notice";
import { Loading } from "../../ui/states";
import { Table } from "../../ui/table";
import type { Version } from "./layout";

/** Fewer patients than this say little of others. */
const FEW = 3;
/** A metric of a manifest, such as `val_dice`, `aster.test_dice/organ` and `aster.test_n/organ`. */
const METRIC = /^(?:(.+?)\.)?(val|test)_(dice|accuracy|n)(?:\/(.*))?$/s;

interface Score {
  mean?: number;
  count?: number;
}
interface Row {
  part: string;
  label: string;
  val: Score;
  test: Score;
}

export function Scores({ version }: { version: Version }) {
  const [manifest, setManifest] = useState<Record<string, unknown> | null>(null);
  const [error, setError] = useState<unknown>(null);
  useEffect(() => {
    const ending = new AbortController();
    const { signal } = ending;
    const path = { model: version.name, version: version.version };
    setManifest(null);
    setError(null);
    call("get", "/models/{model}/versions/{version}", { path, signal }).then(
      ({ data }) => setManifest(data.manifest),
      (problem) => signal.aborted || setError(problem),
    );
    return () => ending.abort();
  }, [version.name, version.version]);
  if (error) return <Rejection error={error} />;
  if (manifest === null) return <Loading />;
  const metrics = (manifest.metrics ?? {}) as Record<string, number>;
  const rows = rowsOf(metrics);
  if (rows.length === 0) return null;
  const isDice = Object.keys(metrics).some((name) => name.includes("_dice"));
  const what = isDice ? "Dice" : "Accuracy";
  const counted = isDice ? "patients" : "images";
  return (
    <details>
      <summary>{what} on the members' {counted}</summary>
      <Table
        rows={rows}
        keyOf={(row) => `${row.part}\n${row.label}`}
        columns={[
          { title: "Model", head: true, cell: (row) => row.part || "this version" },
          { title: "Label", cell: (row) => row.label || "all" },
          { title: "Validation", number: true, cell: (row) => row.val.mean?.toFixed(3) ?? "–" },
          { title: `Validation ${counted}`, number: true, cell: (row) => <Count score={row.val} /> },
          { title: "Test", number: true, cell: (row) => row.test.mean?.toFixed(3) ?? "–" },
          { title: `Test ${counted}`, number: true, cell: (row) => <Count score={row.test} /> },
        ]}
      />
      <p class="hint">
        The version was chosen on validation {counted}; by test {counted} nothing was chosen. Of fewer than {FEW} a figure says little.
      </p>
    </details>
  );
}

/** n, with a word where it is small, or was not recorded. */
function Count({ score }: { score: Score }) {
  if (score.mean === undefined) return <>–</>;
  if (score.count === undefined) return <>not recorded</>;
  return (
    <>
      {score.count} {score.count < FEW && <span class="chip warn">few</span>}
    </>
  );
}

function rowsOf(metrics: Record<string, number>): Row[] {
  const rows = new Map<string, Row>();
  for (const [name, value] of Object.entries(metrics)) {
    const found = METRIC.exec(name);
    if (!found) continue;
    const [, part = "", split, measure, label = ""] = found;
    const key = `${part}\n${label}`;
    const row = rows.get(key) ?? { part, label, val: {}, test: {} };
    row[split as "val" | "test"][measure === "n" ? "count" : "mean"] = value;
    rows.set(key, row);
  }
  return [...rows.values()].filter((row) => row.val.mean !== undefined || row.test.mean !== undefined);
}
