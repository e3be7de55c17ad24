/** Which model answers, in plain words. */
import { hospitals, loadAdapted, type Model, models, referenceOf } from "../../app/catalogue";
import { Unsigned } from "../../app/empty";
import { Terms } from "../../app/glossary";
import { Select } from "../../ui/controls";
import type { Personalization, Question } from "./asking";
import { isChoosing } from "./state";

const WORDS: Record<Personalization, { label: string; hint: string }> = {
  auto: {
    label: "By default",
    hint: "The version assigned to this hospital. Else the hospital's own model, where it beat the federation's. Else the federation's.",
  },
  global: { label: "The federation's model", hint: "One model that all member hospitals trained together." },
  member: { label: "A member hospital's own model", hint: "The model that a member trained for its own scanner." },
  hospital: { label: "The version adapted to this hospital", hint: "Rejected where no version was assigned to the hospital." },
  scan: { label: "Adapted to this scan alone", hint: "The model is adapted to this one scan, and nothing is kept. It takes longer." },
};

/** The same for a model that was made elsewhere, of which no federation has one. */
function wordsOf(personalization: Personalization, model: Model | undefined): { label: string; hint: string } {
  const imported = model?.imported;
  if (!imported) return WORDS[personalization];
  const hint = `Imported from ${imported}.`;
  if (personalization === "global") return { label: "The imported model", hint };
  if (personalization === "auto") return { label: WORDS.auto.label, hint: `The version assigned to this hospital. Else the imported model. ${hint}` };
  return WORDS[personalization];
}

/** What a model can answer with. */
export const offeredBy = (model: Model | undefined): readonly Personalization[] =>
  (Object.keys(WORDS) as Personalization[]).filter((each) => model?.personalizations.includes(each) ?? each === "auto");

/** Paths that answer for one scan. */
const ANSWERS = ["/segment", "/classify"];

/** Whether it answers with classes, and not with a mask. */
export const classifies = (model: Model | undefined) => model?.answers === "/classify";

/** Versions that answer for a scan. Those that a hospital joins with masks before they can be relied on come last. */
export const answering = () => {
  const all = models.value.filter((model) => ANSWERS.includes(model.answers) && model.latest !== null);
  const rank = (model: Model) => Number(model.kind === "cross-attention") + 2 * Number(classifies(model));
  return [...all].sort((one, other) => rank(one) - rank(other));
};

export function Choices(given: { question: Question; onChange: (question: Question) => void }) {
  const { question, onChange } = given;
  const all = answering();
  const model = all.find((each) => referenceOf(each) === question.model);
  const change = (changed: Partial<Question>) => onChange({ ...question, ...changed });
  return (
    <>
      <Select
        label="Model"
        value={question.model}
        options={[
          ...(all.length === 0 || model || isChoosing.value ? [] : [{ value: "", label: "Choose a model", disabled: true }]),
          ...all.map((each) => ({
            value: referenceOf(each),
            label: each.hospital === null ? each.name : `${referenceOf(each)} (adapted to ${each.hospital})`,
          })),
        ]}
        hint={model && <Terms text={`${classifies(model) ? "Tells apart" : "Finds"} ${model.labels.join(", ")}: ${model.summary}.`} />}
        onChange={(value) => {
          const chosen = all.find((each) => referenceOf(each) === value)!;
          const next: Partial<Question> = { model: value, personalization: "auto" };
          if (chosen.hospital !== null) next.hospital = chosen.hospital;
          change(next);
        }}
      />
      <Unsigned />
      <Select
        label="Hospital of the scan"
        value={question.hospital}
        disabled={model?.hospital != null}
        options={[
          { value: "", label: "Not said" },
          ...hospitals.value.map((each) => ({ value: each.id, label: `${each.name}${each.site ? ` (site ${each.site})` : ""}` })),
        ]}
        onChange={(hospital) => {
          void loadAdapted(hospital);
          change({ hospital });
        }}
      />
      <Select
        label="Who answers"
        value={question.personalization}
        options={offeredBy(model).map((value) => ({
          value,
          label: wordsOf(value, model).label,
          disabled: value === "hospital" && question.hospital === "",
        }))}
        hint={<Terms text={wordsOf(question.personalization, model).hint} />}
        onChange={(personalization) => change({ personalization })}
      />
      {question.personalization === "member" && (
        <Select
          label="Member"
          value={question.site}
          options={[
            { value: "", label: "The hospital's own site" },
            ...(model?.sites ?? []).map((site) => ({ value: site, label: site })),
          ]}
          onChange={(site) => change({ site })}
        />
      )}
    </>
  );
}
