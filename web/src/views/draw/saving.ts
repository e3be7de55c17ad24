/** Save a drawing soon after each stroke, one save after the other. */
import { computed, signal } from "@preact/signals";

const PAUSE_MS = 1200;

export type SaveState = "saved" | "changed" | "saving" | "failed";

export class Saving {
  readonly state = signal<SaveState>("saved");
  readonly error = signal<unknown>(null);
  readonly isSafe = computed(() => this.state.value === "saved");
  private timer: ReturnType<typeof setTimeout> | undefined;
  private running: Promise<void> = Promise.resolve();

  /** `write` takes the drawing's state before it first waits. */
  constructor(private readonly write: () => Promise<void>) {}

  /** Note a change: it is saved after a pause without further ones. */
  changed(): void {
    clearTimeout(this.timer);
    this.state.value = "changed";
    this.timer = setTimeout(() => void this.now(), PAUSE_MS);
  }

  /** Give up what is not saved. */
  drop(): void {
    clearTimeout(this.timer);
    this.error.value = null;
    this.state.value = "saved";
  }

  /** Save at once what is not saved. It never throws: `state` and `error` say what happened. */
  async now(): Promise<void> {
    clearTimeout(this.timer);
    if (this.state.peek() === "saving") await this.running;
    if (this.state.peek() === "saved" || this.state.peek() === "saving") return;
    this.state.value = "saving";
    this.running = this.write().then(
      () => {
        this.error.value = null;
        // A stroke in between has its own save.
        if (this.state.peek() === "saving") this.state.value = "saved";
      },
      (error: unknown) => {
        clearTimeout(this.timer);
        this.error.value = error;
        this.state.value = "failed";
      },
    );
    await this.running;
  }
}
