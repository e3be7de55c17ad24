/** What a person decides: that an alarm was looked into, and how often false alarms may be. */
import { useState } from "preact/hooks";
import { call } from "../../api/client";
import { Decision } from "../../app/decision";
import { Select } from "../../ui/controls";
import { alarmInWords, scannerName, since, type Stop, STOPS, type Watch } from "./words";

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
