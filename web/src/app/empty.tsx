/** What a service without models or hospitals says: what is missing, who adds it, and how. */
import { Notice } from "../ui/notice";
import { models } from "./catalogue";
import { RegisterHospital } from "./register";
import { has } from "./session";

/** Models of which no version answers, since no trusted key signed one. */
const unsigned = () => models.value.filter((each) => each.untrusted && each.latest === null);

/** `lacks`: such as "No model that can be adapted". */
export function NoModel({ lacks }: { lacks: string }) {
  if (unsigned().length > 0) return <Unsigned />;
  return (
    <p>
      {lacks} is in the store of this service. <code>locum train --method iop-fl --data FOLDER --out STORE</code> trains one of your
      own data and publishes it there; without <code>--data</code>, one of a phantom to try. <code>locum demo</code> starts another
      service, with models and a hospital.
    </p>
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
      <Notice title={given.title}>
        <div class="stack tight">
          {given.hospital && <p>No hospital is registered{has("admin") ? "." : ": an admin registers it."}</p>}
          {given.hospital && <RegisterHospital />}
          {given.lacks !== null && <NoModel lacks={given.lacks} />}
        </div>
      </Notice>
    </div>
  );
}
