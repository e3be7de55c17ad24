/** One hospital and model: whether all is as usual, by scanner, and what to do where it is not. */
import { useState } from "preact/hooks";
import { hospitals } from "../../app/catalogue";
import { Terms } from "../../app/glossary";
import { has } from "../../app/session";
import { count, day, many, moment, sentence, upperFirst } from "../../ui/format";
import { Table } from "../../ui/table";
import { AnswerAlarms, SetRule } from "./deciding";
import { Lines } from "./lines";
import { Unseen } from "./unseen";
import { alarmInWords, type Details, everyMonths, scannerName, since, SILENCE, type State, STOPS, urgency, valueInWords, type Watch, worst } from "./words";

/** Answers that say what is usual. */
const REFERENCE = 50;
/** Scanners that are shown at once: those that are not routine first. */
const FIRST = 4;

export const hospitalName = (id: string): string => hospitals.value.find((each) => each.id === id)?.name ?? id;

/** `details`: null until they were read. */
export function Strip({ watches, details, onDecided }: { watches: readonly Watch[]; details: Details | null; onDecided: () => void }) {
  const [setting, setSetting] = useState(false);
  const one = watches[0]!;
  const name = `${hospitalName(one.hospital)}, ${one.model}`;
  const price = watches.find((each) => each.price !== null)?.price ?? null;
  const stop = STOPS.find((each) => each.value === one.stop)!;
  const ordered = [...watches].sort((left, right) => urgency(right) - urgency(left));
  const most = Math.max(FIRST, ordered.filter((each) => urgency(each) > 0).length);
  const known = new Set(watches.map((each) => each.scanner));
  const scanner = (watch: Watch) => (
    <Scanner
      key={watch.scanner ?? ""}
      watch={watch}
      details={details}
      // Beyond a number of scanners the service watches the others together.
      points={details?.points.filter((point) => (known.has(point.scanner) ? point.scanner : null) === watch.scanner) ?? null}
      onDecided={onDecided}
    />
  );
  return (
    <section class="card stack watch-strip" aria-label={name}>
      <div class="row">
        <Dot state={worst(watches)} />
        <h2>
          {hospitalName(one.hospital)} <span class="mono soft">{one.model}</span>
        </h2>
      </div>
      {ordered.slice(0, most).map(scanner)}
      {ordered.length > most && (
        <details>
          <summary>{many(ordered.length - most, "more scanner")}, routine</summary>
          <div class="stack">{ordered.slice(most).map(scanner)}</div>
        </details>
      )}
      <Unseen hospital={one.hospital} model={one.model} />
      <div class="row watch-foot">
        <p class="hint">
          <Terms text={upperFirst(everyMonths(one.months))} />
          {price === null ? "." : `: ${price}.`} While an alarm waits, {stop.words}.
        </p>
        {has("approver") && (
          <button type="button" class="button quiet small" onClick={() => setSetting(true)} aria-label={`Set the watch of ${name}`}>
            Set
          </button>
        )}
      </div>
      {details !== null && <Answered details={details} />}
      {setting && (
        <SetRule
          watch={one}
          onClose={(isDone) => {
            setSetting(false);
            if (isDone) onDecided();
          }}
        />
      )}
    </section>
  );
}

function Dot({ state }: { state: State }) {
  return (
    <span class={`watch-state ${state}`}>
      <span class="dot" aria-hidden="true" />
      {state}
    </span>
  );
}

function Scanner(given: { watch: Watch; details: Details | null; points: Details["points"] | null; onDecided: () => void }) {
  const { watch, details, points, onDecided } = given;
  const [answering, setAnswering] = useState(false);
  return (
    <div class="stack tight" role="group" aria-label={scannerName(watch.scanner)}>
      <div class="row">
        <h3>{upperFirst(scannerName(watch.scanner))}</h3>
        {watch.state !== "routine" && (
          <span class="soft">
            {watch.state} {since(watch.since)}
          </span>
        )}
        <span class="grow" />
        <Arrivals watch={watch} />
      </div>
      {watch.learning && (
        <p class="hint">
          It learns what is usual: {count(watch.answers)} of {REFERENCE - watch.known} answers.
        </p>
      )}
      {watch.alarms.map((alarm) => (
        <details key={alarm.id} class="watch-alarm">
          <summary>
            {upperFirst(alarmInWords(alarm.stream, alarm.up))} {since(alarm.since)}
          </summary>
          <p class="hint">Raised {moment(alarm.at)}.</p>
          <Deviant stream={alarm.stream} details={details} alarm={alarm.id} />
        </details>
      ))}
      {watch.alarms.length > 0 &&
        (has("operator") ? (
          <div class="row">
            <button type="button" class="button small" onClick={() => setAnswering(true)}>
              Answer
            </button>
          </div>
        ) : (
          <p class="hint">An operator answers it.</p>
        ))}
      {details !== null && points !== null && (
        <Lines
          watch={watch}
          points={points}
          events={details.events.filter((each) => each.scanner === (watch.scanner ?? ""))}
        />
      )}
      {answering && (
        <AnswerAlarms
          watch={watch}
          onClose={(isDone) => {
            setAnswering(false);
            if (isDone) onDecided();
          }}
        />
      )}
    </div>
  );
}

/** Today's answers against what is usual on such a weekday. */
function Arrivals({ watch }: { watch: Watch }) {
  const { today, usual_today: usual } = watch;
  return (
    <span class="watch-arrivals soft">
      {count(today)} today{usual > 0 && `, usually ${count(Number(usual.toPrecision(2)))}`}
      {usual > 0 && (
        <svg width="80" height="8" viewBox="0 0 80 8" aria-hidden="true">
          <path class="usual" d="M0,4 H80" />
          <path class="today" d={`M0,4 H${Math.min(80, (80 * today) / usual).toFixed(1)}`} />
        </svg>
      )}
    </span>
  );
}

function Deviant({ stream, details, alarm }: { stream: string; details: Details | null; alarm: number }) {
  const found = details?.events.find((each) => each.id === alarm)?.deviant ?? [];
  if (found.length === 0) {
    const why = stream === SILENCE ? "Nothing arrived, so no answer can be shown" : "Its answers are older than those that are drawn";
    return <p class="hint">{sentence(why)}</p>;
  }
  return (
    <Table
      rows={found}
      keyOf={(point) => point.observation}
      columns={[
        { title: "Time", head: true, cell: (point) => moment(point.at) },
        { title: "Request", cell: (point) => <span class="mono">{point.request}</span> },
        { title: upperFirst(stream), number: true, cell: (point) => valueInWords(stream, point.values[stream]!) },
      ]}
    />
  );
}

/** The alarms of before, with what a person found. */
function Answered({ details }: { details: Details }) {
  const found = details.events.filter((each) => each.kind === "alarm" && each.answered_at !== null);
  if (found.length === 0) return null;
  return (
    <details>
      <summary>{many(found.length, "answered alarm")}</summary>
      <ul class="watch-list">
        {found.map((each) => (
          <li key={each.id}>
            {day(each.at)}, {scannerName(each.scanner)}: {alarmInWords(each.stream ?? "", each.details.up as boolean | undefined)}.{" "}
            <span class="soft">
              {each.answered_by}, {day(each.answered_at!)}: {each.reason}
            </span>
          </li>
        ))}
      </ul>
    </details>
  );
}
