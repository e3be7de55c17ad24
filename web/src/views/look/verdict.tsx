/** What a person says of an answer: it is right, or it is corrected. */
import { useEffect, useState } from "preact/hooks";
import { correct, correctable, type Correctable, type Correction } from "../../app/correcting";
import { Terms } from "../../app/glossary";
import { address } from "../../app/router";
import { Rejection } from "../../ui/notice";

/** `onCorrect` is called before the answer is opened in Draw. */
export function Verdict({ answer, onCorrect }: { answer: Correctable; onCorrect: () => void }) {
  const [found, setFound] = useState<Correction | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [busy, setBusy] = useState(false);
  useEffect(() => {
    setFound(null);
    setError(null);
  }, [answer.request]);
  const accept = async () => {
    setBusy(true);
    setError(null);
    try {
      setFound(await correct(answer, null));
    } catch (problem) {
      setError(problem);
    } finally {
      setBusy(false);
    }
  };
  return (
    <div class="stack tight" role="group" aria-label="Is it right?">
      <div class="row">
        <button type="button" class="button small" disabled={busy || found !== null} onClick={() => void accept()}>
          {found ? "Accepted" : "Accept"}
        </button>
        <button
          type="button"
          class="button small"
          onClick={() => {
            correctable.value = answer;
            onCorrect();
            const { hospital, model, request } = answer;
            location.hash = address("draw", { hospital, model: model.split("@")[0], correct: request });
          }}
        >
          Correct
        </button>
      </div>
      <p class="hint">
        <Terms text="Scan and mask are kept at the hospital, without the patient. No model learns from them until the hospital agrees." />
      </p>
      <Rejection error={error} />
    </div>
  );
}
