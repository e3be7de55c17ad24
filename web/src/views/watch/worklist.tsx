/** Masks to look at first: the answers of which the model was least sure, beside the hospital's others. */
import { useEffect, useState } from "preact/hooks";
import { call, type Schema } from "../../api/client";
import { knownHospital } from "../../app/catalogue";
import { Terms } from "../../app/glossary";
import { correct, type Correction, correctionWords } from "../../app/correcting";
import { rankInShort } from "../../app/review";
import { address, keepInAddress, place } from "../../app/router";
import { Select } from "../../ui/controls";
import { moment } from "../../ui/format";
import { Rejection } from "../../ui/notice";
import { usePage } from "../../ui/pager";
import { Empty, Loading } from "../../ui/states";
import { Table } from "../../ui/table";
import { hospitalName } from "./strip";

type Observation = Schema<"ObservationView">;

/** The most doubtful that are read, and those of a page of the list. */
const MOST = 100;
const PAGE = 10;

/** A hospital and a model of which answers were observed. */
export interface Pair {
  hospital: string;
  model: string;
}

const keyOf = ({ hospital, model }: Pair) => `${hospital}/${model}`;

export function WorkList({ pairs }: { pairs: readonly Pair[] }) {
  const named = place.value.parameters;
  const asked = pairs.find((each) => each.hospital === named.get("hospital") && each.model === named.get("model"));
  const chosen = asked ?? pairs.find((each) => each.hospital === knownHospital()) ?? pairs[0];
  if (chosen === undefined) return null;
  return (
    <section class="card stack tight" aria-label="Masks to look at first">
      <h2>Masks to look at first</h2>
      <p class="hint">
        <Terms text="The newest 500 answers of the version that serves, by the label of which it was least sure. A low confidence is no error, and a high one no proof." />
      </p>
      {pairs.length > 1 && (
        <Select
          label="Hospital and model"
          value={keyOf(chosen)}
          options={pairs.map((each) => ({ value: keyOf(each), label: `${hospitalName(each.hospital)}, ${each.model}` }))}
          onChange={(value) => keepInAddress({ ...pairs.find((each) => keyOf(each) === value) })}
        />
      )}
      <Answers key={keyOf(chosen)} {...chosen} />
    </section>
  );
}

function Answers({ hospital, model }: Pair) {
  const [found, setFound] = useState<readonly Observation[] | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [corrections, setCorrections] = useState<ReadonlyMap<string, Correction>>(new Map());
  const opensDraw = ({ request, kept }: Observation) => address("draw", { hospital, model, correct: request, ...kept });
  const { shown, pager } = usePage(found ?? [], PAGE, "Pages of masks");
  useEffect(() => {
    const ending = new AbortController();
    const { signal } = ending;
    const query = { model, order: "review" as const, limit: MOST };
    call("get", "/hospitals/{hospital}/observations", { path: { hospital }, query, signal }).then(
      ({ data }) => setFound(data.observations),
      (problem) => signal.aborted || setError(problem),
    );
    return () => ending.abort();
  }, []);
  useEffect(() => {
    let over = false;
    call("get", "/hospitals/{hospital}/corrections", { path: { hospital }, query: { model, limit: MOST } }).then(
      ({ data }) => over || setCorrections(new Map(data.corrections.map((each) => [each.request, each]))),
      (problem) => over || setError(problem),
    );
    return () => (over = true);
  }, []);
  const accept = async ({ request }: Observation) => {
    try {
      const found = await correct({ hospital, request }, null);
      setCorrections((before) => new Map(before).set(request, found));
      setError(null);
    } catch (problem) {
      setError(problem);
    }
  };
  const look = async ({ id: observation, review }: Observation) => {
    try {
      const path = { hospital, observation };
      const { data } = await call("put", "/hospitals/{hospital}/observations/{observation}/looked", { path });
      // Where it stands, so that the next one is where it was.
      setFound((before) => before!.map((each) => (each.id === observation ? { ...data, review: review ?? null } : each)));
      setError(null);
    } catch (problem) {
      setError(problem);
    }
  };
  return (
    <>
      <Rejection error={error} />
      {found === null && !error && <Loading what="the answers" />}
      {found?.length === 0 && <Empty title="No mask yet">The version that serves has answered no scan of this hospital.</Empty>}
      {shown.length > 0 && (
        <Table
          class="watch-work"
          rows={shown}
          keyOf={(each) => each.id}
          columns={[
            { title: "Time", head: true, cell: (each) => moment(each.at) },
            { title: "Label", cell: (each) => leastSure(each)?.label ?? "–" },
            { title: "Among the others", cell: (each) => rankInShort(leastSure(each)?.rank ?? null) },
            { title: "Confidence", number: true, cell: (each) => leastSure(each)?.confidence.toFixed(2) ?? "–" },
            { title: "Scanner", cell: (each) => each.scanner ?? "–" },
            {
              title: "Request",
              cell: ({ kept, request }) => (
                <>
                  {kept && (
                    <div>
                      <a href={address("look", { hospital, model, ...kept, answer: "now" })} title="Look at it, with the answer of the version that serves">
                        {kept.scan}
                      </a>
                    </div>
                  )}
                  <span class="mono">{request}</span>
                </>
              ),
            },
            {
              title: "Is it right?",
              cell: (each) => {
                const { request } = each;
                const known = corrections.get(request);
                if (known) return <span class="soft">{correctionWords(known)}</span>;
                return (
                  <span class="row tight">
                    <button type="button" class="button small" onClick={() => void accept(each)} aria-label={`Accept ${request}`}>
                      Accept
                    </button>
                    <a class="button small" href={opensDraw(each)} aria-label={`Correct ${request}`}>
                      Correct
                    </a>
                  </span>
                );
              },
            },
            {
              title: "Looked at",
              cell: (each) =>
                each.looked_at ? (
                  <span class="soft" title={moment(each.looked_at)}>
                    by {each.looked_by}
                  </span>
                ) : (
                  <button type="button" class="button small" onClick={() => void look(each)} aria-label={`Looked at ${each.request}`}>
                    Looked at
                  </button>
                ),
            },
          ]}
        />
      )}
      {pager}
    </>
  );
}

/** The label that is doubted most: by its rank, or of too few answers by its confidence. */
function leastSure({ labels, review }: Observation): { label: string; rank: number | null; confidence: number } | undefined {
  return Object.entries(labels)
    .map(([label, { confidence }]) => ({ label, rank: review?.[label] ?? null, confidence }))
    .sort((one, other) => (one.rank ?? 1) - (other.rank ?? 1) || one.confidence - other.confidence)[0];
}
