/** Six steps through the page, for a person who sees it first. They are shown once by themselves, and again from `?`. */
import { signal } from "@preact/signals";
import { useEffect, useId, useRef, useState } from "preact/hooks";
import "./tour.css";

/** `at`: the `data-tour` of what the step is about; where the view has none, the step stands alone. */
const STEPS: readonly { at: string; title: string; words: string }[] = [
  {
    at: "stage",
    title: "The scan and its mask",
    words: "The answer is drawn over the scan in colour, and a mask that a person drew below it. The wheel changes the slice. What the answer warns of stands above the picture.",
  },
  {
    at: "question",
    title: "Who answers",
    words: "The federation's model, a hospital's own version, or a model fitted to this one scan, of which nothing is kept. “Ask again” changes it.",
  },
  {
    at: "answer",
    title: "What the answer says",
    words: "Each label with its size, how sure the model is beside the hospital's other answers, and a receipt, by which the same answer can be made again.",
  },
  {
    at: "comparison",
    title: "Before and after",
    words: "Keep this answer, then ask the federation's model about the same scan: both are shown side by side, with how far they agree.",
  },
  {
    at: "views",
    title: "A version for a hospital",
    words: "Adapt fits a model to a hospital by scans without masks, checks it, and takes it back in one call. Draw makes masks. Oversee shows what serves whom.",
  },
  {
    at: "help",
    title: "Words and keys",
    words: "Words with dots below them open the glossary. “?” lists the keys, and shows this tour again.",
  },
];

const STORED = "locum-tour";
const step = signal<number | null>(null);

export function beginTour(): void {
  step.value = 0;
  try {
    localStorage.setItem(STORED, "shown");
  } catch {
    // A browser that stores nothing shows it wherever an address asks for it.
  }
}

/** Begin it where an address asks for it, unless this browser has shown it before. */
export function offerTour(): void {
  let isKnown = false;
  try {
    isKnown = localStorage.getItem(STORED) !== null;
  } catch {
    // See above.
  }
  if (!isKnown) beginTour();
}

export const Tour = () => (step.value === null ? null : <Steps at={step.value} />);

function Steps({ at }: { at: number }) {
  const id = useId();
  const dialog = useRef<HTMLDialogElement>(null);
  const next = useRef<HTMLButtonElement>(null);
  const { title, words, at: name } = STEPS[at]!;
  const around = useRectangle(name);
  useEffect(() => dialog.current?.showModal(), []);
  useEffect(() => next.current?.focus(), [at]);
  const leave = () => dialog.current?.close();
  return (
    <dialog ref={dialog} class="tour" aria-labelledby={`${id}-title`} aria-describedby={`${id}-words`} onClose={() => (step.value = null)}>
      {around && <div class="tour-ring" style={inPixels(around)} />}
      <div class="tour-card stack tight" style={around ? inPixels(beside(around)) : {}}>
        <div aria-live="polite">
          <p class="hint">
            Step {at + 1} of {STEPS.length}
          </p>
          <h2 id={`${id}-title`}>{title}</h2>
          <p id={`${id}-words`}>{words}</p>
        </div>
        <div class="row">
          <button type="button" class="button quiet small" onClick={leave}>
            Leave the tour
          </button>
          <span class="grow" />
          <button type="button" class="button small" disabled={at === 0} onClick={() => (step.value = at - 1)}>
            Back
          </button>
          <button
            ref={next}
            type="button"
            class="button primary small"
            onClick={() => (at + 1 < STEPS.length ? (step.value = at + 1) : leave())}
          >
            {at + 1 < STEPS.length ? "Next" : "Done"}
          </button>
        </div>
      </div>
    </dialog>
  );
}

/** In pixels of the window. */
type Rectangle = {
  left: number;
  top: number;
  width: number;
  height: number;
};

/** Where what a step is about stands, also after the window changes. */
function useRectangle(name: string): Rectangle | null {
  const [found, setFound] = useState<Rectangle | null>(null);
  useEffect(() => {
    const element = document.querySelector(`[data-tour="${name}"]`);
    element?.scrollIntoView({ block: "nearest" });
    const measure = () => {
      const { left, top, width, height } = element?.getBoundingClientRect() ?? { left: 0, top: 0, width: 0, height: 0 };
      setFound(width === 0 ? null : { left, top, width, height });
    };
    measure();
    window.addEventListener("resize", measure);
    return () => window.removeEventListener("resize", measure);
  }, [name]);
  return found;
}

const inPixels = (values: Record<string, number>) => Object.fromEntries(Object.entries(values).map(([name, value]) => [name, `${value}px`]));

const CARD = { width: 340, height: 230, gap: 14 };

/** Right of it, left of it, or below it, where there is room; else in its lower right corner. */
function beside({ left, top, width, height }: Rectangle): { left: number; top: number } {
  const [right, bottom] = [left + width, top + height];
  const within = (value: number, most: number) => Math.max(CARD.gap, Math.min(value, most - CARD.gap));
  const y = within(top, window.innerHeight - CARD.height);
  if (right + CARD.gap + CARD.width < window.innerWidth) return { left: right + CARD.gap, top: y };
  if (left - CARD.gap - CARD.width > 0) return { left: left - CARD.gap - CARD.width, top: y };
  const x = within(right - CARD.width - CARD.gap, window.innerWidth - CARD.width);
  return { left: x, top: within(bottom + CARD.gap, window.innerHeight - CARD.height) };
}
