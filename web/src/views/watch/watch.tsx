/** Watch: whether a hospital's answers are as they were, and which masks to look at first. */
import { useEffect, useState } from "preact/hooks";
import { call } from "../../api/client";
import { catalogueError, loadCatalogue } from "../../app/catalogue";
import { readEach } from "../../app/each";
import { Terms } from "../../app/glossary";
import { useRefreshed } from "../../app/refreshed";
import { many } from "../../ui/format";
import { Rejection } from "../../ui/notice";
import { usePage } from "../../ui/pager";
import { Empty, Loading } from "../../ui/states";
import { hospitalName, Strip } from "./strip";
import { type Details, STATES, type Watch, worst } from "./words";
import { WorkList } from "./worklist";
import "./watch.css";

/** Slow: what is watched changes in days. */
const REFRESH_MS = 60_000;
/** The answers of which lines are drawn, and the strips of a page. */
const ANSWERS = 300;
const STRIPS = 20;

/** The watches of one hospital and model. */
interface Group {
  key: string;
  hospital: string;
  model: string;
  watches: Watch[];
}

export default function WatchPage() {
  useEffect(() => void loadCatalogue(), []);
  const [version, setVersion] = useState(0);
  const [found, error] = useRefreshed(async () => (await call("get", "/watch")).data.watches, REFRESH_MS, version);
  const groups = found === null ? [] : grouped(found);
  const { shown, pager } = usePage(groups, STRIPS, "Pages of watches");
  const [details, failure] = useDetails(shown, found);
  const urgent = groups.filter((each) => worst(each.watches) === "investigate").length;
  return (
    <div class="watch">
      <div class="stack tight">
        <h1>Watch</h1>
        {groups.length > 0 && (
          <p role="status" class="soft">
            <Terms
              text={urgent === 0 ? `${many(groups.length, "model")} watched, and no alarm.` : `${urgent} of ${many(groups.length, "model")} to investigate.`}
            />
          </p>
        )}
      </div>
      <Rejection error={catalogueError.value ?? error ?? failure} onRetry={() => setVersion(version + 1)} />
      {found === null && !error && <Loading what="the watches" />}
      {found?.length === 0 && (
        <Empty title="Nothing is watched yet">
          Every answer to a scan that names its hospital is watched. The first ones say what is usual.
        </Empty>
      )}
      {shown.map((group) => (
        <Strip key={group.key} watches={group.watches} details={details.get(group.key) ?? null} onDecided={() => setVersion(version + 1)} />
      ))}
      {pager}
      <WorkList pairs={groups} />
    </div>
  );
}

/** Those to investigate first, then by name. */
function grouped(watches: readonly Watch[]): Group[] {
  const found = new Map<string, Group>();
  for (const watch of watches) {
    const { hospital, model } = watch;
    const key = `${hospital}/${model}`;
    const group = found.get(key) ?? { key, hospital, model, watches: [] };
    group.watches.push(watch);
    found.set(key, group);
  }
  const urgency = ({ watches: own }: Group) => STATES.indexOf(worst(own));
  return [...found.values()].sort(
    (one, other) =>
      urgency(other) - urgency(one) ||
      hospitalName(one.hospital).localeCompare(hospitalName(other.hospital)) ||
      one.model.localeCompare(other.model),
  );
}

/** The lines and events of the groups, read again whenever the watches were; and why some could not be read. */
function useDetails(groups: readonly Group[], version: unknown): [ReadonlyMap<string, Details>, unknown] {
  const [details, setDetails] = useState<ReadonlyMap<string, Details>>(new Map());
  const [failure, setFailure] = useState<unknown>(null);
  useEffect(() => {
    const ending = new AbortController();
    const { signal } = ending;
    readEach(groups, signal, async ({ key, hospital, model }) => {
      const path = { hospital, model };
      const { data } = await call("get", "/hospitals/{hospital}/watch/{model}", { path, query: { limit: ANSWERS }, signal });
      setDetails((before) => new Map([...before, [key, data]]));
    }).then(
      () => setFailure(null),
      (problem) => signal.aborted || setFailure(problem),
    );
    return () => ending.abort();
  }, [version, groups.map((each) => each.key).join("\n")]);
  return [details, failure];
}
