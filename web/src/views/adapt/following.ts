/**
 * Follow a job by server-sent events. The browser reconnects, and continues after the last event it has; where no
 * event arrives, the job is read every few seconds.
 */
import { call, Problem, type Schema } from "../../api/client";

export type Job = Schema<"JobView">;

/** The job that a person just started or chose: it is brought into sight. */
export const sought = { job: "" };
export const FINISHED: readonly string[] = ["succeeded", "fell_back", "failed", "cancelled"];
const EVENTS = ["state", "progress", "epoch", "gate", "warning"];
const GATHER_MS = 250;
const RETRY_MS = 3000;
/** A proxy may keep events back, and a dead connection is silent. */
const POLL_MS = 10_000;

/** Call `onChange` with the job now and after every change. Returns how to stop. */
export function follow(id: string, onChange: (job: Job) => void, onError: (error: unknown) => void): () => void {
  let source: EventSource | null = null;
  let timer: ReturnType<typeof setTimeout> | null = null;
  let over = false;
  const stop = () => {
    over = true;
    source?.close();
    clearInterval(poll);
    if (timer !== null) clearTimeout(timer);
  };
  const look = async () => {
    timer = null;
    try {
      const { data } = await call("get", "/jobs/{job}", { path: { job: id } });
      if (over) return;
      onChange(data);
      if (FINISHED.includes(data.state)) stop();
    } catch (error) {
      if (over) return;
      // No such job, here or for this caller: the next answer would be the same.
      if (error instanceof Problem && (error.status === 404 || error.status === 422)) stop();
      onError(error);
    }
  };
  // Events arrive in bursts, and the job is read once for each.
  const soon = () => {
    timer ??= setTimeout(() => void look(), GATHER_MS);
  };
  const poll = setInterval(soon, POLL_MS);
  const open = () => {
    if (over) return;
    source = new EventSource(`jobs/${id}/events`);
    for (const name of EVENTS) source.addEventListener(name, soon);
    source.onerror = () => {
      // Rejected, other than interrupted: the browser gives up, and this tries again.
      if (source?.readyState === EventSource.CLOSED && !over) setTimeout(open, RETRY_MS);
      soon();
    };
  };
  void look().then(open);
  return stop;
}
