/** The words of the page, for a person who meets them first here. `docs/reference/glossary.md` has the same. */
import { signal } from "@preact/signals";
import { type ComponentChildren, createContext } from "preact";
import { useContext, useEffect, useId, useMemo } from "preact/hooks";
import { type Definition, Definitions } from "../ui/definitions";
import { Words } from "../ui/notice";

const WORDS: readonly Definition[] = [
  { word: "Adapting", meaning: "Fitting a model to the scans of one hospital, without anyone drawing on them. It makes a candidate." },
  { word: "Alarm", meaning: "A change that the watch noticed: the numbers of a scanner's answers are not as they were. A person finds out why, and answers it." },
  { word: "Assigning", meaning: "The decision that a version answers for a hospital from now on. The log keeps who decided, and why." },
  { word: "Candidate", meaning: "A new version that a job made. It answers for no hospital until a person assigns it." },
  { word: "Cohort", meaning: "Scans that a hospital sent together, to adapt a model to them. They are deleted after some weeks." },
  { word: "Confidence", meaning: "How sure the model is of a label, from 0 to 1, by its own figures. It is not the chance that the mask is right: compare it with the hospital's other answers." },
  { word: "Dice", meaning: "How much two outlines overlap: 1 or 100 % if they are the same, 0 if they do not meet." },
  { word: "Dose", meaning: "How far an adaptation moves a model. The more unlike a hospital's scans are, the larger it is." },
  { word: "Epoch", meaning: "One pass of a job over all scans that it learns from." },
  { word: "Federation", meaning: "Hospitals that train a model together while their scans stay at home." },
  { word: "Federation's model", meaning: "The one model that all members trained together. It answers where nothing fits better. Also called the global model." },
  { word: "Gate", meaning: "Checks of a candidate before it may answer for a hospital. A person can decide against them, and the log keeps that." },
  { word: "Hospital from outside", meaning: "A hospital that took no part in the training." },
  { word: "Joining", meaning: "Fitting a model to one hospital by scans on which someone drew. It makes a candidate." },
  { word: "Label", meaning: "What is outlined, such as an organ or a tumour." },
  { word: "Mask", meaning: "The outline of each label in a scan, point by point: drawn by a person, or by a model." },
  { word: "Member", meaning: "A hospital of the federation. Its part in the training is called its site." },
  { word: "Model", meaning: "A program that has learned from scans to draw masks, or to tell classes of scans apart." },
  { word: "Override", meaning: "Assigning a candidate that its checks rejected. The log keeps it with its reason." },
  { word: "Practice", meaning: "Members took turns as a hospital from outside, so that it is known how much adapting helps, and when it harms." },
  { word: "Receipt", meaning: "What was asked and exactly what answered. With it an answer can be made again, bit for bit." },
  { word: "Review", meaning: "How an answer stands among the hospital's newest answers by its confidence: the least sure ones are the masks to look at first." },
  { word: "Rolling back", meaning: "Taking the latest decision back: what answered before answers again." },
  { word: "Serving", meaning: "Answering for a hospital's scans." },
  { word: "Shift", meaning: "How far a hospital's scans look from those of the members, mostly because of another scanner." },
  { word: "Uncertainty", meaning: "How undecided the model is at a point, or between classes, from 0 to 1. It is not the chance of an error." },
  { word: "Version", meaning: "A model as it was at one time, with a number. It never changes, so that an old answer can be explained." },
  { word: "Warning", meaning: "A reason to look twice at an answer, such as a scan that looks unlike all scans the model learned from." },
  { word: "Watch", meaning: "Counts whether a hospital's answers are still as they were, by model and scanner, and raises an alarm where they are not." },
  { word: "Withdrawn", meaning: "A version that was found wrong. It answers no more." },
  { word: "Zero-shot", meaning: "An answer for a hospital that the model does not know yet, and that no hospital should rely on." },
];

/** Other forms in which the page writes a word, beside its plural. */
const FORMS: Readonly<Record<string, readonly string[]>> = {
  Adapting: ["adaptation", "adapted"],
  Assigning: ["assigned", "assigns"],
  "Federation's model": ["global model"],
  Joining: ["joins"],
  Review: ["least sure"],
  "Rolling back": ["roll back", "rolled back"],
  Serving: ["serves"],
  Watch: ["watched"],
};

const wordOf = new Map(WORDS.flatMap(({ word }) => [word, ...(FORMS[word] ?? [])].map((form) => [form.toLowerCase(), word])));
// Longer words first: a federation's model is no federation.
const FOUND = new RegExp(`\\b((?:${[...wordOf.keys()].sort((one, other) => other.length - one.length).join("|")})s?)\\b`, "gi");

/** The word at which the list is open: "" is its beginning, null is closed. */
const shown = signal<string | null>(null);

/** Which text of a view links a word; it is the first one that has it. */
const Links = createContext(new Map<string, string>());

/** A view, in which each word of the glossary is linked once. */
export function Glossed({ children }: { children: ComponentChildren }) {
  const links = useMemo(() => new Map<string, string>(), []);
  return <Links.Provider value={links}>{children}</Links.Provider>;
}

/** `Words`, of which those of the glossary open it where they stand first in the view. Not for labels and buttons. */
export function Terms({ text }: { text: string }) {
  const id = useId();
  const links = useContext(Links);
  useEffect(
    () => () => {
      for (const [word, owner] of links) if (owner === id) links.delete(word);
    },
    [],
  );
  const inText = new Set<string>();
  const linked = (part: string) =>
    part.split(FOUND).map((piece, i) => {
      const word = i % 2 ? wordOf.get(piece.toLowerCase()) ?? wordOf.get(piece.toLowerCase().replace(/s$/, "")) : undefined;
      if (word === undefined || inText.has(word) || (links.get(word) ?? id) !== id) return piece;
      links.set(word, id);
      inText.add(word);
      return (
        <button key={i} type="button" class="term" title={`${word}: open the glossary`} onClick={() => (shown.value = word)}>
          {piece}
        </button>
      );
    });
  return <Words text={text} plain={linked} />;
}

/** A button that opens the list. */
export function Glossary() {
  return (
    <>
      <button type="button" class="button quiet small" onClick={() => (shown.value = "")}>
        Glossary
      </button>
      {shown.value !== null && <Definitions title="Glossary" entries={WORDS} at={shown.value} onClose={() => (shown.value = null)} />}
    </>
  );
}
