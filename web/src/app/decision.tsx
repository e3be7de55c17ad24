/** What a person decides, with a reason, and with a name where the service does not know who asks. */
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { Dialog } from "../ui/dialog";
import { Rejection } from "../ui/notice";
import { session } from "./session";

/** Who decides, where the service does not know it. */
export type Who = { actor?: string };

export function Decision(given: {
  title: string;
  isReady?: boolean;
  /** Against what was computed. */
  isDanger?: boolean;
  /** Whether no reason is asked. */
  isPlain?: boolean;
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
  const isReady = (given.isReady ?? true) && (given.isPlain || reason.trim() !== "") && (isKnown || actor.trim() !== "");
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
        {!given.isPlain && (
          <label class="field">
            <span class="label">Reason</span>
            <textarea value={reason} onInput={(event) => setReason(event.currentTarget.value)} required />
          </label>
        )}
        <Rejection error={error} />
        <div class="row">
          <button type="submit" class={`button ${given.isDanger ? "danger" : "primary"}`} disabled={!isReady}>
            {given.title}
          </button>
        </div>
      </form>
    </Dialog>
  );
}
