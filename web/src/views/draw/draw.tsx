/** Draw: masks on the scans of a cohort, and a job that learns from them. */
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { catalogueLoaded, hospitals, loadCatalogue, type Model, models } from "../../app/catalogue";
import { type CohortScan, maskWords, scansOf, useCohorts } from "../../app/cohorts";
import { Catalogue, Missing } from "../../app/empty";
import { Terms } from "../../app/glossary";
import { isDoubtful, mostDoubtfulFirst } from "../../app/review";
import { keepInAddress, place } from "../../app/router";
import { leave, saved } from "../../app/unsaved";
import { Select, Toggle } from "../../ui/controls";
import { many } from "../../ui/format";
import { usePage } from "../../ui/pager";
import { Rejection } from "../../ui/notice";
import { Empty, Loading } from "../../ui/states";
import "../../viewer/stage.css";
import { CohortScans, StartJob } from "../adapt/scans";
import { type Label, labelsOf } from "./labels";
import { Correcting } from "./correction";
import { begin as beginStored, beginnings, firstBeginning, sourceOf } from "./opening";
import { Stage } from "./stage";
import { StoredActions } from "./stored";

/** A job learns from masks of this many patients at least. */
const FEWEST = 2;

/** Models that learn from masks come first. */
const drawable = () => {
  const all = models.value.filter((each) => each.answers === "/segment" && each.hospital === null && each.latest !== null);
  return [...all].sort((one, other) => ORDER.indexOf(one.masks) - ORDER.indexOf(other.masks));
};
const ORDER: readonly Model["masks"][] = ["required", "optional", "none"];
const NONE: readonly CohortScan[] = [];
const joins = (model: Model) => model.kind === "cross-attention";

export default function Draw() {
  useEffect(() => void loadCatalogue(), []);
  const parameters = place.value.parameters;
  const all = drawable();
  const hospital =
    hospitals.value.find((each) => each.id === parameters.get("hospital")) ??
    hospitals.value.find((each) => each.site === null) ??
    hospitals.value[0];
  // An answer that is corrected may be of a version adapted to its hospital.
  const named = parameters.get("correct") ? models.value : all;
  const model = named.find((each) => each.name === parameters.get("model") && each.latest !== null) ?? all[0];
  if (!catalogueLoaded.value) return <Catalogue title="Draw" />;
  if (hospital === undefined || model === undefined) {
    const lacks = model === undefined ? "No model that draws masks" : null;
    return <Missing title="There is nothing to draw yet" lacks={lacks} hospital={hospital === undefined} />;
  }
  return <Masks key={hospital.id} hospital={hospital.id} isMember={hospital.site != null} model={model} all={all} />;
}

function Masks(given: { hospital: string; isMember: boolean; model: Model; all: readonly Model[] }) {
  const { hospital, isMember, model, all } = given;
  const [version, setVersion] = useState(0);
  const [found, setScans] = useState<readonly CohortScan[] | null>(null);
  const scans = found ?? NONE;
  const [labels, setLabels] = useState<readonly Label[]>([]);
  const [error, setError] = useState<unknown>(null);
  const cohorts = useCohorts(hospital, version, setError) ?? [];
  const wanted = place.value.parameters.get("cohort");
  const cohort = wanted === "new" ? "" : (wanted ?? cohorts[0]?.id ?? "");
  const named = place.value.parameters.get("scan");
  const scan = scans.find((each) => each.name === named);
  const isByDoubt = place.value.parameters.get("order") === "doubt";
  const byDoubt = useMemo(() => mostDoubtfulFirst(scans, (each) => each.review), [scans]);
  const listed = isByDoubt ? byDoubt : scans;
  const { shown, pager, open } = usePage(listed, 100, "Pages of scans");

  useEffect(() => {
    let over = false;
    if (cohort === "") setScans([]);
    else scansOf(hospital, cohort).then((list) => !over && setScans(list), setError);
    return () => (over = true);
  }, [cohort, version]);
  // An address may name a scan that the cohort got after its list was read.
  const namedBefore = useRef(named);
  useEffect(() => {
    if (named !== null && named !== namedBefore.current && scan === undefined) setVersion((last) => last + 1);
    namedBefore.current = named;
  }, [named]);
  // An address names a scan that may be on a later page.
  useEffect(() => open(listed.findIndex((each) => each.name === named)), [scans.length, isByDoubt]);
  useEffect(() => {
    let over = false;
    labelsOf(model).then((list) => !over && setLabels(list), setError);
    return () => (over = true);
  }, [model.name, model.latest?.version]);

  const choices = beginnings(model, hospital);
  const asked = place.value.parameters.get("begin");
  const begin = choices.find((each) => each.value === asked)?.value ?? firstBeginning(model);
  const go = (next: Record<string, string | null>) => void leave(() => keepInAddress(next));
  const onMask = (name: string, mask: CohortScan["mask"] | null) =>
    setScans((list) => (list ?? []).map((each) => (each.name === name ? { ...each, mask } : each)));
  const spot = scan ? { hospital, cohort, name: scan.name } : null;
  const latest = useRef({ model, labels, begin, onMask });
  latest.current = { model, labels, begin, onMask };
  const request = place.value.parameters.get("correct");
  if (request) {
    return (
      <div class="workbench">
        <Correcting request={request} hospital={hospital} model={model} labels={labels} />
      </div>
    );
  }
  const drawn = scans.filter((each) => each.mask);
  // After the open one, and from the first again.
  const at = byDoubt.findIndex((each) => each.name === named) + 1;
  const next = [...byDoubt.slice(at), ...byDoubt.slice(0, at)].find((each) => !each.mask && each.name !== named);
  const targets = drawn.filter((each) => each.mask!.values.some((value) => value !== 0));
  return (
    <div class="workbench">
      <div class="workbench-side stack">
        <h1>Draw masks</h1>
        <Select
          label="Hospital"
          value={hospital}
          options={hospitals.value.map((each) => ({ value: each.id, label: each.name }))}
          onChange={(value) => go({ hospital: value, cohort: null, scan: null })}
        />
        <Select
          label="Model"
          value={model.name}
          options={all.map((each) => ({ value: each.name, label: each.name }))}
          hint={<Terms text={`Its task names ${labels.map((each) => each.name).join(", ")}: ${model.summary}.`} />}
          onChange={(value) => go({ model: value })}
        />
        <Select
          label="A scan without a mask begins with"
          value={begin}
          options={choices}
          hint={
            <Terms text="A model's mask is saved once it is changed or taken. To compare models by your masks, begin with nothing: a corrected mask agrees more with the model that drew it." />
          }
          onChange={(value) => go({ begin: value })}
        />
        <section class="card stack" aria-label="Scans">
          <CohortScans
            hospital={hospital}
            cohorts={cohorts}
            cohort={cohort}
            channels={model.channel_names}
            onCohort={(id) => go({ cohort: id || "new", scan: null })}
            onChange={() => setVersion((last) => last + 1)}
          />
          {cohort !== "" && found === null && error === null && <Loading what="the scans" />}
          {found?.length === 0 && <Empty title="No scan yet">Add scans above: each is listed here, with its mask.</Empty>}
          {scans.length > 1 && (
            <div class="row">
              <Toggle label="Most doubtful first" value={isByDoubt} onChange={(isOn) => go({ order: isOn ? "doubt" : null })} />
              <button type="button" class="button small" disabled={next === undefined} onClick={() => next && go({ cohort, scan: next.name })}>
                Next doubtful scan
              </button>
            </div>
          )}
          <ul class="picks" aria-label="Scans of the cohort">
            {shown.map((each) => (
              <li key={each.name}>
                <button
                  type="button"
                  class="button quiet"
                  aria-pressed={each.name === named}
                  onClick={() => go({ cohort, scan: each.name })}
                >
                  <span class="clip">{each.name}</span>
                  {isDoubtful(each.review ?? null) && <span class="chip warn">look twice</span>}
                  <span class={`chip ${maskWords(each).tone}`}>{maskWords(each).words}</span>
                </button>
              </li>
            ))}
          </ul>
          {pager}
        </section>
        <Rejection error={error} />
        {model.masks !== "none" && (
          <section class="card stack" aria-label={joins(model) ? "Joining" : "Adaptation by masks"}>
            <h2>{joins(model) ? `Join ${model.name}` : `Adapt ${model.name} by these masks`}</h2>
            <p>
              {many(drawn.length, "mask")} of {many(scans.length, "scan")}, {targets.length} with a target.
            </p>
            <p class="hint">
              <Terms
                text={
                  joins(model) && isMember
                    ? "A member of the federation has a model of its own, and does not join."
                    : `The job learns from masks of at least ${FEWEST} patients with a target: five to twenty are usual. Scans without a mask are not learned from.`
                }
              />
            </p>
            <StartJob
              hospital={hospital}
              cohort={cohort}
              model={model.name}
              kind={joins(model) ? "joining" : "masks"}
              disabled={(joins(model) && isMember) || targets.length < FEWEST}
              before={saved}
            />
          </section>
        )}
      </div>
      <Stage
        source={spot && { id: sourceOf(spot), name: spot.name }}
        labels={labels}
        begin={(viewer, signal, onProgress) => beginStored(viewer, spot!, () => latest.current, signal, onProgress)}
        actions={(open, viewer, reopen) =>
          scan && spot && <StoredActions key={open.source} {...{ open, viewer, scan, model, onMask }} place={spot} onRemoved={reopen} />
        }
      />
    </div>
  );
}
