/** A scan of a cohort, in place of one from this computer. */
import { useEffect, useState } from "preact/hooks";
import { hospitals, referenceOf } from "../../app/catalogue";
import { CohortSelect, type CohortScan, maskWords, scansOf, useCohorts } from "../../app/cohorts";
import { isDoubtful, mostDoubtfulFirst } from "../../app/review";
import { keepInAddress, place } from "../../app/router";
import { offerTour } from "../../app/tour";
import { Select } from "../../ui/controls";
import { Rejection } from "../../ui/notice";
import { answering, classifies } from "./choices";
import { choose, firstChosen } from "./first";
import { answerNow, openStored, question, scan } from "./state";

export function StoredScans() {
  const wanted = place.peek().parameters;
  const [hospital, setHospital] = useState(wanted.get("hospital") ?? "");
  const [cohort, setCohort] = useState(wanted.get("cohort") ?? "");
  const [scans, setScans] = useState<CohortScan[]>([]);
  const [error, setError] = useState<unknown>(null);
  const cohorts = useCohorts(hospital, null, setError) ?? [];
  const name = place.value.parameters.get("scan") ?? "";
  const open = async (found: CohortScan | undefined) => {
    if (found === undefined) return;
    keepInAddress({ cohort, scan: found.name });
    const opening = openStored({ hospital, cohort, name: found.name }, found.mask ?? null);
    await firstChosen();
    // Unless another scan or view was opened meanwhile.
    const isHere = () => place.peek().view === "look" && place.peek().parameters.get("scan") === found.name;
    if (!isHere()) return;
    choose({ ...question.peek(), hospital });
    const asked = place.peek().parameters;
    const wants = (what: string) => asked.get(what) === "now";
    if (!wants("answer")) return;
    keepInAddress({ answer: null, tour: null });
    await opening;
    const model = answering().find((each) => referenceOf(each) === question.peek().model);
    if (isHere() && model !== undefined && scan.peek()?.name === found.name) await answerNow(classifies(model));
    if (isHere() && wants("tour")) offerTour();
  };
  useEffect(() => {
    setScans([]);
    if (cohort === "") return;
    scansOf(hospital, cohort).then((found) => {
      setScans(found);
      // An address that names a scan opens it, unless it is open.
      if (name !== "" && scan.peek()?.name !== name) void open(found.find((each) => each.name === name));
    }, setError);
  }, [hospital, cohort]);
  return (
    <details class="card" open={cohort !== ""}>
      <summary>A scan of a cohort</summary>
      <div class="stack">
        <Select
          label="Hospital of the cohort"
          value={hospital}
          options={[
            { value: "", label: "Choose a hospital" },
            ...hospitals.value.map((each) => ({ value: each.id, label: each.name })),
          ]}
          onChange={(id) => {
            setHospital(id);
            setCohort("");
          }}
        />
        <CohortSelect cohorts={cohorts} value={cohort} none={{ label: "Choose a cohort" }} onChange={setCohort} />
        {cohort !== "" && (
          <Select
            label="Scan"
            value={name}
            options={[
              { value: "", label: "Choose a scan" },
              ...mostDoubtfulFirst(scans, (each) => each.review).map((each) => ({
                value: each.name,
                label: `${each.name} (${maskWords(each).words}${isDoubtful(each.review ?? null) ? ", look twice" : ""})`,
              })),
            ]}
            onChange={(chosen) => void open(scans.find((each) => each.name === chosen))}
          />
        )}
        <Rejection error={error} />
      </div>
    </details>
  );
}
