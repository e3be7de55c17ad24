/** What becomes of a mask that is drawn on a scan of a cohort: it is saved by itself. */
import { useState } from "preact/hooks";
import { call } from "../../api/client";
import { type Model, referenceOf } from "../../app/catalogue";
import type { CohortScan, ScanPlace } from "../../app/cohorts";
import { address } from "../../app/router";
import { Dialog } from "../../ui/dialog";
import { Rejection } from "../../ui/notice";
import { carry } from "../../viewer/carried";
import type { Viewer } from "../../viewer/viewer";
import type { Open } from "./opening";
import type { SaveState } from "./saving";

const STATES: Record<SaveState, { words: string; tone: string }> = {
  saved: { words: "Saved", tone: "good" },
  changed: { words: "Not saved yet", tone: "warn" },
  saving: { words: "Saving …", tone: "accent" },
  failed: { words: "Not saved", tone: "bad" },
};

export function StoredActions(given: {
  open: Open;
  viewer: Viewer;
  place: ScanPlace;
  scan: CohortScan;
  model: Model;
  onMask: (name: string, mask: CohortScan["mask"] | null) => void;
  onRemoved: () => void;
}) {
  const { open, viewer, place, scan } = given;
  const { hospital, cohort, name } = place;
  const [removing, setRemoving] = useState(false);
  const [error, setError] = useState<unknown>(null);
  const remove = async () => {
    open.saving.drop();
    try {
      await call("delete", "/hospitals/{hospital}/cohorts/{cohort}/scans/{name}/mask", { path: { ...place } });
      setRemoving(false);
      given.onMask(name, null);
      given.onRemoved();
    } catch (found) {
      setError(found);
    }
  };
  return (
    <>
      <SaveMark open={open} />
      <span class="grow" />
      <a
        class="button small"
        href={address("look", { hospital, cohort, scan: name, model: referenceOf(given.model) })}
        onClick={() => carry(name, viewer)}
      >
        Look
      </a>
      <button
        type="button"
        class="button small"
        onClick={() => {
          open.drawing.noTarget();
          // Also where nothing was drawn: an empty mask says that the scan was reviewed.
          open.saving.changed();
          void open.saving.now();
        }}
      >
        No target here
      </button>
      <button type="button" class="button small" disabled={!scan.mask} onClick={() => setRemoving(true)}>
        Remove the mask
      </button>
      {removing && (
        <Dialog title="Remove the mask" onClose={() => setRemoving(false)}>
          <div class="stack">
            <p>The mask of {name} is deleted. The scan stays, and counts as not reviewed.</p>
            <Rejection error={error} />
            <div class="row">
              <button type="button" class="button danger" onClick={() => void remove()}>
                Remove the mask
              </button>
            </div>
          </div>
        </Dialog>
      )}
    </>
  );
}

/** Whether the mask is saved, since when, or that it is a model's which nobody has taken yet. */
function SaveMark({ open: { saving, drawing, drawnBy } }: { open: Open }) {
  const state = saving.state.value;
  const isProposal = drawing.isUntouched && state === "saved";
  const at = saving.at.value;
  const words = state === "saved" && at !== null ? `Saved by itself at ${at.toLocaleTimeString()}` : STATES[state].words;
  return (
    <>
      <span class={`chip ${isProposal ? "accent" : STATES[state].tone}`} role="status" data-save={isProposal ? "proposal" : state}>
        {isProposal ? `Drawn by ${drawnBy}, not saved` : words}
      </span>
      {isProposal && (
        <button
          type="button"
          class="button small"
          onClick={() => {
            drawing.accept();
            void saving.now();
          }}
        >
          Save it as it is
        </button>
      )}
    </>
  );
}

