/** Boxes for what went wrong, or well. */
import type { ComponentChildren } from "preact";
import { Problem } from "../api/client";

export type Tone = "plain" | "good" | "warn" | "bad";

export function Notice(given: { tone?: Tone; title?: string; children?: ComponentChildren }) {
  const { tone = "plain", title, children } = given;
  return (
    <div class={`notice ${tone}`} role={tone === "bad" ? "alert" : undefined}>
      {title && <strong>{title}</strong>}
      {children && <div>{children}</div>}
    </div>
  );
}

/** Words of the service: what stands in `backticks` is a command or a name. */
export function Words({ text }: { text: string }) {
  return <>{text.split("`").map((part, i) => (i % 2 ? <code key={i}>{part}</code> : part))}</>;
}

/** A rejection in the service's own words, which say what to do. */
export function Rejection({ error }: { error: unknown }) {
  if (!error) return null;
  if (!(error instanceof Problem)) {
    return <Notice tone="bad" title="This did not work">{error instanceof Error ? error.message : String(error)}</Notice>;
  }
  const fields = Array.isArray(error.members.errors) ? (error.members.errors as { field: string; reason: string }[]) : [];
  return (
    <Notice tone="bad" title={error.title}>
      <p>
        <Words text={error.detail} />
      </p>
      {fields.length > 0 && (
        <ul>
          {fields.map((each) => (
            <li key={each.field}>
              <code>{each.field}</code>: {each.reason}
            </li>
          ))}
        </ul>
      )}
    </Notice>
  );
}
