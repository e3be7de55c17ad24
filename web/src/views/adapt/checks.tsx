/** Check a candidate with a few masks: the scans to draw, and what their masks say. */
import { useEffect, useState } from "preact/hooks";
import { call } from "../../api/client";
import { type CohortScan, maskWords, scansOf } from "../../app/cohorts";
import { Terms } from "../../app/glossary";
import { mostDoubtfulFirst } from "../../app/review";
import { address } from "../../app/router";
import { many } from "../../ui/format";
import { Rejection } from "../../ui/notice";
import { FINISHED, follow, type Job } from "./following";

interface Draw {
  /** The digest of the scan. */
  scan: string;
  disagreement: number;
}

/** `onVerdict` is called when masks have decided, or their decision was taken back. */
export function MaskCheck({ job, onVerdict }: { job: Job; onVerdict: () => void }) {
  const hospital = job.hospital ?? "";
  const cohort = job.cohort ?? "";
  const [masks, setMasks] = useState(8);
  const [checks, setChecks] = useState<readonly Job[]>([]);
  const [scans, setScans] = useState<readonly CohortScan[]>([]);
  const [error, setError] = useState<unknown>(null);
  const [version, setVersion] = useState(0);
  const [busy, setBusy] = useState(false);
  const check = checks.find((each) => each.kind === "mask-check");
  const running = checks.find((each) => !FINISHED.includes(each.state));
  useEffect(() => {
    let over = false;
    call("get", "/jobs/{job}/checks", { path: { job: job.id } }).then(({ data }) => over || setChecks(data.checks), setError);
    scansOf(hospital, cohort).then((found) => over || setScans(found), setError);
    return () => (over = true);
  }, [job.id, version]);
  useEffect(() => {
    if (running === undefined) return;
    return follow(
      running.id,
      (found) => {
        if (!FINISHED.includes(found.state)) return;
        setVersion((last) => last + 1);
        if (found.kind === "mask-verdict") onVerdict();
      },
      setError,
    );
  }, [running?.id]);
  const ask = async (request: () => Promise<unknown>) => {
    setBusy(true);
    setError(null);
    try {
      await request();
      setVersion((last) => last + 1);
    } catch (found) {
      setError(found);
    } finally {
      setBusy(false);
    }
  };
  const path = { job: job.id };
  const choose = () => ask(() => call("post", "/jobs/{job}/checks", { path, json: { masks } }));
  const measure = () =>
    ask(() => call("post", "/jobs/{job}/checks/{check}/verdict", { path: { ...path, check: check!.id } }));
  const takeBack = () => ask(() => call("delete", "/jobs/{job}/checks/verdict", { path }).then(onVerdict));
  const chosen = (check?.result as { draws?: Draw[] } | null)?.draws ?? [];
  const draws = mostDoubtfulFirst(
    chosen.map((draw) => ({ ...draw, found: scans.find((each) => each.sha256 === draw.scan) })),
    ({ found }) => found?.review,
  );
  const drawn = draws.filter((each) => each.found?.mask).length;
  const hasVerdict = (job.gate as { masks?: unknown } | null)?.masks !== undefined;
  return (
    <section class="card stack" aria-label="Check with masks">
      <h2>Check this candidate with masks</h2>
      <p class="hint">
        <Terms text="Masks of a few scans say whether the candidate is better than the global model, where the gate could not tell." />{" "}
        The service draws the scans, more often where the two answer differently.
      </p>
      {check?.state === "failed" && <p class="hint">{check.reason}</p>}
      {draws.length > 0 && (
        <>
          <p>
            {drawn} of {many(draws.length, "scan")} drawn. A scan without a target needs an empty mask.
          </p>
          <ul class="picks" aria-label="Scans to draw">
            {draws.map((each) => (
              <li key={each.scan}>
                {each.found ? (
                  <a class="button quiet" href={address("draw", { hospital, model: job.model, cohort, scan: each.found.name, begin: "nothing" })}>
                    <span class="clip">{each.found.name}</span>
                    <span class={`chip ${maskWords(each.found).tone}`}>{maskWords(each.found).words}</span>
                  </a>
                ) : (
                  <span class="hint">A scan that is not in the cohort any more: choose scans again.</span>
                )}
              </li>
            ))}
          </ul>
        </>
      )}
      {running && <p role="status">{running.status.doing ?? running.status.sentence}</p>}
      <Rejection error={error} />
      <div class="row">
        {draws.length > 0 && (
          <button
            type="button"
            class="button primary"
            disabled={busy || running !== undefined || drawn < draws.length}
            onClick={() => void measure()}
          >
            Measure by these masks
          </button>
        )}
        <label class="row masks-wanted">
          Masks
          <input
            type="number"
            min={2}
            max={60}
            value={masks}
            onInput={(event) => setMasks(Number(event.currentTarget.value))}
          />
        </label>
        <button type="button" class="button" disabled={busy || running !== undefined} onClick={() => void choose()}>
          {draws.length > 0 ? "Choose scans again" : "Choose scans to draw"}
        </button>
        {hasVerdict && (
          <button type="button" class="button" disabled={busy} onClick={() => void takeBack()}>
            Take back what the masks decided
          </button>
        )}
      </div>
    </section>
  );
}
