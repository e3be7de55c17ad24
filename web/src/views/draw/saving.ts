/** Save a drawing soon after each stroke, or when a person says so; one save after the other. */
import { computed, signal } from "@preact/signals";

const PAUSE_MS = 1200;

export type SaveState = "saved" | "changed" | "saving" | "failed";

export class Saving {
  readonly state = signal<SaveState>("saved");
  readonly error = signal<unknown>(null);
  /** When it was saved last. */
  readonly at = signal<Date | null>(null);
  readonly isSafe = computed(() => this.state.value === "saved");
  private timer: ReturnType<typeof setTimeout> | undefined;
  private queue: Promise<void> = Promise.resolve();
  private latest = 0;

  /**
   * `take` copies the drawing at once, and returns how the copy is sent.
   *
   * `isByHand`: it is sent when a person says so (`send`), and not by itself.
   */
  constructor(
    private readonly take: () => () => Promise<void>,
    readonly isByHand = false,
  ) {}

  /** Note a change: it is saved after a pause without further ones. */
  changed(): void {
    clearTimeout(this.timer);
    this.state.value = "changed";
    if (!this.isByHand) this.timer = setTimeout(() => void this.now(), PAUSE_MS);
  }

  /** Give up what is not saved. */
  drop(): void {
    clearTimeout(this.timer);
    this.latest += 1;
    this.error.value = null;
    this.state.value = "saved";
  }

  /** Save at once what is not saved. It never throws: `state` and `error` say what happened. */
  async now(): Promise<void> {
    if (!this.isByHand) await this.send();
  }

  /** The same, also of what is sent by hand. */
  async send(): Promise<void> {
    clearTimeout(this.timer);
    if (["changed", "failed"].includes(this.state.peek())) {
      const [send, number] = [this.take(), (this.latest += 1)];
      this.state.value = "saving";
      this.queue = this.queue.then(send).then(
        () => this.ended(number, "saved", null),
        (error: unknown) => this.ended(number, "failed", error),
      );
    }
    await this.queue;
  }

  private ended(number: number, state: SaveState, error: unknown): void {
    // A later save says how it ended itself, and a stroke since has its own save.
    if (number !== this.latest) return;
    this.error.value = error;
    if (this.state.peek() === "saving" || state === "failed") this.state.value = state;
    if (state === "saved") this.at.value = new Date();
    if (state === "failed") clearTimeout(this.timer);
  }
}
