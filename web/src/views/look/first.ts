/** Which model is chosen: the one that a person or the address names, else the one that was assigned to the hospital. */
import { call, type Schema } from "../../api/client";
import { hospitals, knownHospital, loadCatalogue, type Model, referenceOf } from "../../app/catalogue";
import { readEach } from "../../app/each";
import { rememberHospital } from "../../app/remembered";
import { keepInAddress, place } from "../../app/router";
import type { Question } from "./asking";
import { answering, offeredBy } from "./choices";
import { isChoosing, question } from "./state";

type Serving = Schema<"ServingView">;

/** Whether a person or the address named the model. */
let isNamed = false;
/** Whether an earlier visit had a hospital to choose: without one, "Not said" was no choice. */
let hadHospitals = false;
/** Ends the search for a model that a later choice makes idle. */
let search = new AbortController();
let first = Promise.resolve();

/** Take the choice from the address, else the hospital's model. */
export function chooseFirst(): void {
  first = chooseByAddress();
}

/** Fulfilled once what the address names was taken: a choice writes the address anew. */
export const firstChosen = (): Promise<void> => first;

async function chooseByAddress(): Promise<void> {
  await loadCatalogue();
  const wanted = place.peek().parameters;
  const before = question.peek();
  const isKept = wanted.get("hospital") === null && before.model !== "" && hadHospitals;
  const hospital = isKept ? before.hospital : knownHospital();
  hadHospitals = hospitals.peek().length > 0;
  const reference = wanted.get("model") ?? (isNamed ? before.model : "");
  isNamed = reference !== "";
  const personalization = wanted.get("personalization") ?? before.personalization;
  const chosen = { ...before, hospital };
  if (!isNamed) return void chooseModel(chosen, personalization);
  // An earlier visit's search must not replace it.
  search.abort();
  isChoosing.value = false;
  const model = answering().find((each) => referenceOf(each) === reference);
  // In place of one that is not there no other answers: a person chooses.
  question.value = model === undefined ? { ...chosen, model: "" } : fitted(chosen, model, personalization);
}

/** Take what a person chose. Another hospital has another model, unless the person named one. */
export function choose(next: Question): void {
  const before = question.peek();
  isNamed ||= next.model !== before.model;
  search.abort();
  if (next.hospital !== before.hospital) rememberHospital(next.hospital);
  if (!isNamed && (next.hospital !== before.hospital || isChoosing.peek())) void chooseModel(next, next.personalization);
  else {
    isChoosing.value = false;
    question.value = next;
  }
  const { hospital, personalization } = next;
  // Until a person chooses another, the address keeps a name that is not there.
  const model = isNamed ? next.model || place.peek().parameters.get("model") : "";
  keepInAddress({ model, hospital, personalization: personalization === "auto" ? "" : personalization });
}

/** Until the service has said what was assigned, no model is chosen. */
async function chooseModel(chosen: Question, personalization: string): Promise<void> {
  search.abort();
  search = new AbortController();
  const { signal } = search;
  question.value = { ...chosen, model: "" };
  isChoosing.value = true;
  const model = (await assignedTo(chosen.hospital, signal)) ?? answering().find((each) => answersAt(each, chosen.hospital));
  if (signal.aborted) return;
  isChoosing.value = false;
  if (model !== undefined) question.value = fitted(chosen, model, personalization);
}

const fitted = (chosen: Question, model: Model, personalization: string): Question => ({
  ...chosen,
  model: referenceOf(model),
  personalization: offeredBy(model).find((each) => each === personalization) ?? "auto",
});

/** The model of which a version was assigned to the hospital; of several, by the latest decision. */
async function assignedTo(hospital: string, signal: AbortSignal): Promise<Model | undefined> {
  if (hospital === "") return undefined;
  const found: { model: Model; serving: Serving }[] = [];
  const offered = answering().filter((each) => each.hospital === null);
  try {
    await readEach(offered, signal, async (model) => {
      const path = { hospital, model: model.name };
      found.push({ model, serving: (await call("get", "/hospitals/{hospital}/serving/{model}", { path, signal })).data });
    });
  } catch {
    // What could not be read is not chosen; asking says what is wrong.
  }
  const at = ({ serving }: { serving: Serving }) => serving.assignment?.at ?? "";
  return found
    .filter(({ model, serving }) => serving.because === "assigned" && !serving.withdrawn && isReliable(model, serving, hospital))
    .sort((one, other) => (at(one) < at(other) ? 1 : -1))[0]?.model;
}

/** A model that a hospital joins answers without a warning by a version that learned from its masks. */
const isReliable = (model: Model, { artefact }: Serving, hospital: string) =>
  answersAt(model, hospital) || (artefact !== null && !artefact.startsWith(`${model.name}@`));

/** Whether the federation's model answers at this hospital as it is: one to be joined does at its own members. */
function answersAt(model: Model, hospital: string): boolean {
  const site = hospitals.peek().find((each) => each.id === hospital)?.site;
  return model.hospital === null && (model.kind !== "cross-attention" || (site != null && model.sites.includes(site)));
}
