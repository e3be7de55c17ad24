/** Small controls that several views share. */
import type { ComponentChildren } from "preact";
import { useId, useState } from "preact/hooks";

export interface Option<V extends string> {
  value: V;
  label: string;
  disabled?: boolean;
  /** A colour that is shown before the label. */
  swatch?: string;
}

/** More options than this are found by a part of their label. */
const MANY = 200;

/** A labelled drop-down. `hint` explains the choice in a sentence. */
export function Select<V extends string>(given: {
  label: string;
  value: V;
  options: readonly Option<V>[];
  hint?: ComponentChildren;
  disabled?: boolean;
  onChange: (value: V) => void;
}) {
  const id = useId();
  const [part, setPart] = useState("");
  const isLong = given.options.length > MANY;
  const wanted = part.trim().toLowerCase();
  const found = isLong ? given.options.filter((each) => `${each.label} ${each.value}`.toLowerCase().includes(wanted)) : given.options;
  const chosen = given.options.find((each) => each.value === given.value);
  const shown = found.slice(0, MANY);
  if (chosen !== undefined && !shown.includes(chosen)) shown.unshift(chosen);
  return (
    <div class="field">
      <label for={id}>{given.label}</label>
      {isLong && (
        <input
          type="search"
          placeholder={`A part of one of ${given.options.length}`}
          aria-label={`${given.label}: find`}
          value={part}
          onInput={(event) => setPart(event.currentTarget.value)}
        />
      )}
      <select
        id={id}
        value={given.value}
        disabled={given.disabled}
        aria-describedby={given.hint ? `${id}-hint` : undefined}
        onChange={(event) => given.onChange(event.currentTarget.value as V)}
      >
        {shown.map((option) => (
          <option key={option.value} value={option.value} disabled={option.disabled}>
            {option.label}
          </option>
        ))}
      </select>
      {isLong && found.length > MANY && <p class="hint">{`The first ${MANY} of ${found.length}.`}</p>}
      {given.hint && (
        <p class="hint" id={`${id}-hint`}>
          {given.hint}
        </p>
      )}
    </div>
  );
}

/** One of a few choices, as buttons side by side. */
export function Segmented<V extends string>(given: {
  label: string;
  value: V;
  options: readonly Option<V>[];
  onChange: (value: V) => void;
}) {
  return (
    <div class="segmented" role="group" aria-label={given.label}>
      {given.options.map((option) => (
        <button
          key={option.value}
          type="button"
          disabled={option.disabled}
          aria-pressed={option.value === given.value}
          onClick={() => given.onChange(option.value)}
        >
          {option.swatch && <span class="swatch" style={{ background: option.swatch }} />}
          {option.label}
        </button>
      ))}
    </div>
  );
}

export function Range(given: {
  label: string;
  value: number;
  min?: number;
  max?: number;
  step?: number;
  onInput: (value: number) => void;
}) {
  const id = useId();
  const { min = 0, max = 1, step = 0.05 } = given;
  return (
    <div class="field">
      <label for={id}>{given.label}</label>
      <input
        id={id}
        type="range"
        min={min}
        max={max}
        step={step}
        value={given.value}
        onInput={(event) => given.onInput(Number(event.currentTarget.value))}
      />
    </div>
  );
}

export function Toggle(given: { label: string; value: boolean; onChange: (value: boolean) => void }) {
  return (
    <label class="check">
      <input type="checkbox" checked={given.value} onChange={(event) => given.onChange(event.currentTarget.checked)} />
      {given.label}
    </label>
  );
}

/** Takes files by drag and drop, or by the browser's dialog. */
export function DropZone(given: {
  label: string;
  accept?: string;
  multiple?: boolean;
  children?: ComponentChildren;
  onFiles: (files: File[]) => void;
}) {
  const id = useId();
  const [over, setOver] = useState(false);
  const take = (found: FileList | null | undefined) => {
    const files = [...(found ?? [])];
    if (files.length > 0) given.onFiles(given.multiple ? files : files.slice(0, 1));
  };
  return (
    <div
      class={`dropzone ${over ? "over" : ""}`}
      onDragOver={(event) => {
        event.preventDefault();
        setOver(true);
      }}
      onDragLeave={() => setOver(false)}
      onDrop={(event) => {
        event.preventDefault();
        setOver(false);
        take(event.dataTransfer?.files);
      }}
    >
      <input
        id={id}
        class="visually-hidden"
        type="file"
        accept={given.accept}
        multiple={given.multiple}
        onChange={(event) => {
          take(event.currentTarget.files);
          event.currentTarget.value = "";
        }}
      />
      <label for={id}>
        <strong>{given.label}</strong>
        {given.children}
      </label>
    </div>
  );
}

/** Copies a text, and says whether it did. */
export function CopyButton({ text, label }: { text: string; label: string }) {
  const [outcome, setOutcome] = useState<string | null>(null);
  const copy = async () => {
    let isCopied = true;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // Without permission, or over plain HTTP: the old way.
      const area = document.createElement("textarea");
      area.value = text;
      (document.querySelector("dialog[open]") ?? document.body).append(area);
      area.select();
      isCopied = document.execCommand("copy");
      area.remove();
    }
    setOutcome(isCopied ? "Copied" : "Not copied");
    setTimeout(() => setOutcome(null), 2000);
  };
  return (
    <button type="button" class="button small" onClick={() => void copy()}>
      <span aria-live="polite">{outcome ?? label}</span>
    </button>
  );
}
