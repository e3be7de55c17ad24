/** Register a hospital: an admin's button, and its form. */
import { useId, useState } from "preact/hooks";
import { call } from "../api/client";
import { Select } from "../ui/controls";
import { Dialog } from "../ui/dialog";
import { Rejection } from "../ui/notice";
import { hospitals, loadCatalogue, models } from "./catalogue";
import { has } from "./session";

/** What a path may contain; the service says the same. */
const ID = "[A-Za-z0-9][A-Za-z0-9_\\-]{0,63}";

/** An identifier for a name: `heath-hospital` for Heath Hospital. */
const idFor = (name: string): string =>
  name
    .normalize("NFKD")
    .replace(/\p{Mark}/gu, "")
    .toLowerCase()
    .replace(/[^a-z0-9]+/g, "-")
    .replace(/^-|-$/g, "")
    .slice(0, 64);

/** Nothing where the caller is no admin. */
export function RegisterHospital() {
  const [isOpen, setOpen] = useState(false);
  if (!has("admin")) return null;
  return (
    <>
      <button type="button" class="button small" onClick={() => setOpen(true)}>
        Register a hospital
      </button>
      {isOpen && <Form onClose={() => setOpen(false)} />}
    </>
  );
}

function Form({ onClose }: { onClose: () => void }) {
  const field = useId();
  /** Null until a person writes one: until then it follows the name. */
  const [written, setWritten] = useState<string | null>(null);
  const [name, setName] = useState("");
  const [site, setSite] = useState("");
  const [error, setError] = useState<unknown>(null);
  const sites = [...new Set(models.value.flatMap((model) => model.sites))].sort();
  const id = written ?? idFor(name);
  // The service would rename a hospital that it knows.
  const isTaken = hospitals.value.some((each) => each.id === id);
  const submit = async (event: Event) => {
    event.preventDefault();
    if (isTaken) return;
    try {
      const json = { name: name.trim(), ...(site ? { site } : {}) };
      await call("put", "/hospitals/{hospital}", { path: { hospital: id }, json });
      await loadCatalogue();
      onClose();
    } catch (found) {
      setError(found);
    }
  };
  return (
    <Dialog title="Register a hospital" onClose={onClose}>
      <form class="stack" onSubmit={(event) => void submit(event)}>
        <label class="field">
          <span class="label">Name</span>
          <input type="text" value={name} required maxLength={256} onInput={(event) => setName(event.currentTarget.value)} />
        </label>
        <div class="field">
          <label for={field}>Identifier</label>
          <input
            id={field}
            type="text"
            value={id}
            required
            pattern={ID}
            aria-describedby={`${field}-hint`}
            onInput={(event) => setWritten(event.currentTarget.value)}
          />
          <p class="hint" id={`${field}-hint`}>
            Letters, digits, - and _: programs name the hospital by it, and it does not change.
          </p>
        </div>
        {isTaken && <p role="alert">{id} is registered already.</p>}
        <Select
          label="Site in the federation"
          value={site}
          options={[{ value: "", label: "None: it took no part in training" }, ...sites.map((each) => ({ value: each, label: each }))]}
          hint="A member is served the model that its own site trained, where that beat the federation's."
          onChange={setSite}
        />
        <Rejection error={error} />
        <div class="row">
          <button type="submit" class="button primary" disabled={id === "" || name.trim() === "" || isTaken}>
            Register
          </button>
        </div>
      </form>
    </Dialog>
  );
}
