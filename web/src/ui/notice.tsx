/** Boxes for what went wrong, or well. */
import type { ComponentChildren } from "preact";
import { Problem } from "../api/client";

export type Tone = "plain" | "good" | "warn" | "bad";

/** `action`: what the person can do about it. */
export function Notice(given: { tone?: Tone; title?: string; action?: ComponentChildren; children?: ComponentChildren }) {
  const { tone = "plain", title, action, children } = given;
  return (
    <div class={`notice ${tone}`} role={tone === "bad" ? "alert" : undefined}>
      {title && <strong>{title}</strong>}
      {children && <div>{children}</div>}
      {action}
    </div>
  );
}

/** Words of the service: what stands in `backticks` is a command or a name, and `plain` draws the rest. */
export function Words({ text, plain = (part) => part }: { text: string; plain?: (part: string) => ComponentChildren }) {
  return <>{text.split("`").map((part, i) => (i % 2 ? <code key={i}>{part}</code> : plain(part)))}</>;
}

/** What went wrong. A rejection is in the service's own words, which say what to do. */
export function Rejection({ error, onRetry }: { error: unknown; onRetry?: () => void }) {
  if (!error) return null;
  const retry = onRetry && (
    <button type="button" class="button small" onClick={onRetry}>
      Try again
    </button>
  );
  if (!(error instanceof Problem)) {
    return (
      <Notice tone="bad" title="This did not work" action={retry}>
        {error instanceof Error ? error.message : String(error)}
      </Notice>
    );
  }
  const fields = Array.isArray(error.members.errors) ? (error.members.errors as { field: string; reason: string }[]) : [];
  return (
    <Notice tone="bad" title={error.title} action={retry}>
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
