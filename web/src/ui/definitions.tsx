/** A dialog of words and what they mean. */
import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { Dialog } from "./dialog";

export interface Definition {
  word: string;
  meaning: string;
}

/** Opened at the word `at`, where there is one. */
export function Definitions(given: {
  title: string;
  entries: readonly Definition[];
  at?: string;
  onClose: () => void;
  children?: ComponentChildren;
}) {
  const found = useRef<HTMLDivElement>(null);
  useEffect(() => {
    found.current?.scrollIntoView({ block: "center" });
    found.current?.focus();
  }, [given.at]);
  return (
    <Dialog title={given.title} onClose={given.onClose}>
      {given.children}
      <dl class="definitions">
        {given.entries.map(({ word, meaning }) => (
          <div key={word} {...(word === given.at ? { ref: found, tabIndex: -1, class: "found" } : {})}>
            <dt>{word}</dt>
            <dd>{meaning}</dd>
          </div>
        ))}
      </dl>
    </Dialog>
  );
}
