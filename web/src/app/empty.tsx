/** What a service without models or hospitals says: what is missing, the three ways to a model, and who goes them. */
import type { ComponentChildren } from "preact";
import { useEffect, useId, useState } from "preact/hooks";
import { CopyButton, Segmented } from "../ui/controls";
import { Rejection } from "../ui/notice";
import { Loading, Whole } from "../ui/states";
import { catalogueError, catalogueLoaded, loadCatalogue, models, unreadable } from "./catalogue";
import "./empty.css";
import { RegisterHospital } from "./register";
import { has } from "./session";

/** A model may be published at any time, and the page shows it then. */
const LOOK_AGAIN_MS = 5000;

/** In the place of a view until models and hospitals were read. */
export function Catalogue({ title }: { title: string }) {
  return (
    <Whole title={title}>
      {catalogueError.value ? <Rejection error={catalogueError.value} onRetry={() => void loadCatalogue()} /> : <Loading what="models and hospitals" />}
    </Whole>
  );
}

/** Whether the service has no model at all. */
export const isEmpty = () => catalogueLoaded.value && models.value.length === 0 && unreadable.value.length === 0;

/** Models of which no version answers, since no trusted key signed one. */
const unsigned = () => models.value.filter((each) => each.untrusted && each.latest === null);

/** `lacks`: such as "No model that can be adapted". */
export function NoModel({ lacks }: { lacks: string }) {
  if (unsigned().length > 0) return <Unsigned />;
  return (
    <div class="stack">
      <p>{lacks} is in the store of this service. There are three ways to one:</p>
      <Ways />
    </div>
  );
}

/** Which models do not answer until they are signed; nothing where every model is. */
export function Unsigned() {
  const names = unsigned().map((each) => each.name);
  if (names.length === 0) return null;
  return (
    <p class="hint">
      Not offered, since no trusted key signed {names.length === 1 ? "it" : "them"}: <span class="mono">{names.join(", ")}</span>.
    </p>
  );
}

/** In the place of a view that works on a model and a hospital. `lacks` is null where there is a model. */
export function Missing(given: { title: string; lacks: string | null; hospital: boolean }) {
  return (
    <div class="center">
      <div class="card stack missing">
        <h1>{given.title}</h1>
        {given.lacks !== null && <NoModel lacks={given.lacks} />}
        {given.hospital && (
          <div class="row">
            <p class="grow">No hospital is registered{has("admin") ? "." : ": an admin registers it."}</p>
            <RegisterHospital />
          </div>
        )}
      </div>
    </div>
  );
}

type Way = "demo" | "bring" | "train";
const WAYS: readonly { value: Way; title: string; words: string }[] = [
  { value: "demo", title: "See it work", words: "A trained model and four phantom hospitals; one minute." },
  { value: "bring", title: "Serve the model you have", words: "An nnU-Net folder, a MONAI bundle or an ONNX graph." },
  { value: "train", title: "Train one", words: "On the folders of your hospitals, or on phantoms to try." },
];

/** Three buttons; each opens the commands of its way. The page takes up what they publish by itself. */
function Ways() {
  const id = useId();
  const [open, setOpen] = useState<Way | null>(null);
  useEffect(() => {
    const timer = setInterval(() => void loadCatalogue(), LOOK_AGAIN_MS);
    return () => clearInterval(timer);
  }, []);
  return (
    <>
      <div class="ways">
        {WAYS.map(({ value, title, words }) => (
          <button
            key={value}
            type="button"
            class="way"
            aria-expanded={open === value}
            aria-controls={id}
            onClick={() => setOpen(open === value ? null : value)}
          >
            <strong>{title}</strong>
            <span class="hint">{words}</span>
          </button>
        ))}
      </div>
      <div id={id} class="stack tight" aria-live="polite">
        {open === "demo" && <Demo />}
        {open === "bring" && <Bring />}
        {open === "train" && <Train />}
      </div>
    </>
  );
}

/** A command, and who types it where. */
function Command({ text, children }: { text: string; children: ComponentChildren }) {
  const where = has("admin") ? "On the machine of this service:" : "Ask the person who runs this service to type, on its machine:";
  return (
    <>
      <p>{where}</p>
      <div class="command">
        <pre>{text}</pre>
        <CopyButton text={text} label="Copy" />
      </div>
      <p class="hint">{children}</p>
    </>
  );
}

const STORE = (
  <>
    <code>STORE</code> is the store folder that this service was started with. The page shows the model as soon as it is there.
  </>
);

function Demo() {
  // The demo's own port may be this service's.
  const port = location.port === "8000" ? " --port 8001" : "";
  return (
    <Command text={`locum demo${port}`}>
      It starts a service of its own beside this one and prints the address of a scan with its mask. On another machine, it works as well.
    </Command>
  );
}

type Format = "nnunet" | "bundle" | "onnx";
const FORMATS: readonly { value: Format; label: string; command: string }[] = [
  { value: "nnunet", label: "nnU-Net", command: "locum store import nnunet FOLDER --store STORE" },
  { value: "bundle", label: "MONAI bundle", command: "locum store import bundle BUNDLE.zip --store STORE" },
  { value: "onnx", label: "ONNX", command: "locum store import onnx GRAPH.onnx --task task.yaml --store STORE" },
];

function Bring() {
  const [format, setFormat] = useState<Format>("nnunet");
  return (
    <>
      <div>
        <Segmented label="Format of the model" value={format} options={FORMATS} onChange={setFormat} />
      </div>
      <Command text={FORMATS.find(({ value }) => value === format)!.command}>{STORE}</Command>
    </>
  );
}

function Train() {
  return (
    <Command text="locum train --method iop-fl --data FOLDER --out STORE">
      <code>FOLDER</code> has a folder for each hospital, with <code>images/</code> and <code>masks/</code>. Without <code>--data</code>, phantom
      hospitals train. {STORE}
    </Command>
  );
}
