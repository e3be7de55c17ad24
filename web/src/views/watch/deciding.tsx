/** What a person decides: that an alarm was looked into, and how often false alarms may be. */
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { call } from "../../api/client";
import { session } from "../../app/session";
import { Select } from "../../ui/controls";
import { Dialog } from "../../ui/dialog";
import { Rejection } from "../../ui/notice";
import { alarmInWords, scannerName, since, type Stop, STOPS, type Watch } from "./words";

/** Who decides, where the service does not know it. */
type Who = { actor?: string };

function Decision(given: {
  title: string;
  isReady?: boolean;
  send: (decided: Who & { reason: string }) => Promise<unknown>;
  onClose: (isDone: boolean) => void;
  children: ComponentChildren;
}) {
  const isKnown = session.value?.authenticated ?? false;
  const [reason, setReason] = useState("");
  const [actor, setActor] = useState("");
  const [error, setError] = useState<unknown>(null);
  const submit = async (event: Event) => {
    event.preventDefault();
    try {
      await given.send({ reason, ...(isKnown ? {} : { actor: actor.trim() }) });
      given.onClose(true);
    } catch (found) {
      setError(found);
    }
  };
  const isReady = (given.isReady ?? true) && reason.trim() !== "" && (isKnown || actor.trim() !== "");
  return (
    <Dialog title={given.title} onClose={() => given.onClose(false)}>
      <form class="stack" onSubmit={(event) => void submit(event)}>
        {given.children}
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
        <Rejection error={error} />
        <div class="row">
          <button type="submit" class="button primary" disabled={!isReady}>
            {given.title}
          </button>
        </div>
      </form>
    </Dialog>
  );
}

export function AnswerAlarms({ watch, onClose }: { watch: Watch; onClose: (isDone: boolean) => void }) {
  const { hospital, model, scanner } = watch;
  const path = { hospital, model };
  return (
    <Decision
      title="Answer the alarm"
      send={(decided) => call("post", "/hospitals/{hospital}/watch/{model}/answers", { path, json: { ...decided, scanner } })}
      onClose={onClose}
    >
      <ul class="watch-list">
        {watch.alarms.map((each) => (
          <li key={each.id}>
            {alarmInWords(each.stream, each.up)} {since(each.since)}
          </li>
        ))}
      </ul>
      <p>
        Say what you found. The next answers to {scannerName(scanner)} then say what is usual, and those before are
        compared with no more.
      </p>
    </Decision>
  );
}

export function SetRule({ watch, onClose }: { watch: Watch; onClose: (isDone: boolean) => void }) {
  const { hospital, model } = watch;
  const path = { hospital, model };
  const [months, setMonths] = useState(String(watch.months));
  const [stop, setStop] = useState<Stop>(watch.stop);
  const isReady = Number(months) >= 0.5 && Number(months) <= 120;
  return (
    <Decision
      title="Set the watch"
      isReady={isReady}
      send={(decided) => call("put", "/hospitals/{hospital}/watch/{model}", { path, json: { ...decided, stop, months: Number(months) } })}
      onClose={onClose}
    >
      <label class="field">
        <span class="label">Months between false alarms</span>
        <input
          type="number"
          min="0.5"
          max="120"
          step="0.5"
          value={months}
          onInput={(event) => setMonths(event.currentTarget.value)}
          required
        />
        <span class="hint">Of all numbers and scanners together. The more months, the later a change is found.</span>
      </label>
      <Select
        label="While an alarm waits for a person"
        value={stop}
        options={STOPS}
        hint="It is decided before anything happens, and the audit trail keeps who decided."
        onChange={setStop}
      />
    </Decision>
  );
}
