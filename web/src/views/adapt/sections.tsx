/** The sections of a job's card, as the service says them: what each is about is drawn by its form alone. */
import type { ComponentChildren } from "preact";
import type { Schema } from "../../api/client";
import { Terms } from "../../app/glossary";
import { many, percent } from "../../ui/format";
import { Notice } from "../../ui/notice";

type Section = Schema<"Section">;
type Body<Form> = Extract<NonNullable<Section["body"]>, { form: Form }>;

/** A verdict and curves are open, other sections behind their titles. */
export function Sections({ sections }: { sections: Section[] }) {
  return <>{sections.map((each) => <Drawn key={each.title} section={each} />)}</>;
}

function Drawn({ section }: { section: Section }) {
  const { title, tone, body } = section;
  if (body?.form === "checks") {
    return (
      <div class="stack tight">
        <Notice tone={tone === "good" || tone === "bad" ? tone : "plain"} title={title}>
          <Words section={section} />
        </Notice>
        <Folded title={`All ${many(body.rows.length, "check")}`}>
          <Checks body={body} />
        </Folded>
      </div>
    );
  }
  if (!body || body.form === "curves") {
    return (
      <div class="stack tight">
        <h3>{title}</h3>
        <div class="hint">
          <Words section={section} />
        </div>
        {body && <Curves body={body} />}
      </div>
    );
  }
  return (
    <Folded title={title}>
      <div class="hint">
        <Words section={section} />
      </div>
      {body.form === "heat-map" && <HeatMap body={body} />}
      {body.form === "bars" && <Bars body={body} />}
      {body.form === "forest" && <Forest body={body} />}
      {body.form === "lines" && <Lines body={body} />}
      {body.form === "table" && <Table body={body} />}
    </Folded>
  );
}

function Words({ section }: { section: Section }) {
  return (
    <>
      {section.sentences.map((sentence) => (
        <p key={sentence}>
          <Terms text={sentence} />
        </p>
      ))}
      {section.reasons.length > 0 && (
        <ul class="reasons">
          {section.reasons.map((reason) => (
            <li key={reason}>
              <Terms text={reason} />
            </li>
          ))}
        </ul>
      )}
    </>
  );
}

function Folded({ title, children }: { title: string; children: ComponentChildren }) {
  return (
    <details>
      <summary>{title}</summary>
      <div class="scroll">{children}</div>
    </details>
  );
}

const TONES = { passed: "good", failed: "bad", "not measured": "" };

function Checks({ body }: { body: Body<"checks"> }) {
  return (
    <table>
      <thead>
        <tr>
          <th scope="col">Check</th>
          <th scope="col" class="number">Found</th>
          <th scope="col" class="number">Limit</th>
          <th scope="col">Verdict</th>
        </tr>
      </thead>
      <tbody>
        {body.rows.map((check) => (
          <tr key={check.name}>
            <td>
              {check.name}
              <div class="hint">{check.meaning}</div>
            </td>
            <td class="number">{check.found}</td>
            <td class="number">{check.limit}</td>
            <td>
              <span class={`chip ${TONES[check.outcome]}`}>{check.outcome}</span>
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

/** Where a value lies from `first`, at 0, to `last`, at `length`; in the middle where they are equal. */
const between = (first: number, last: number, length: number) => (value: number) =>
  first === last ? length / 2 : (length * (value - first)) / (last - first);

function Curves({ body }: { body: Body<"curves"> }) {
  const x = between(body.epochs[0]!, body.epochs.at(-1)!, 200);
  return (
    <div class="curves">
      {body.curves.map(({ title, caption, values }) => {
        const known = values.filter((value) => value !== null);
        const y = between(Math.min(...known), Math.max(...known), 36);
        const points = body.epochs.flatMap((epoch, i) => (values[i] == null ? [] : [{ epoch, at: [x(epoch), 42 - y(values[i]!)] }]));
        const words = `${title}, from ${figure(known[0]!)} to ${figure(known.at(-1)!)}`;
        return (
          <figure key={title} class="curve">
            <figcaption>
              {title} <span class="soft">{figure(known.at(-1)!)}</span>
              <div class="hint">{caption}</div>
            </figcaption>
            <svg viewBox="-4 0 208 48" role="img" aria-label={words}>
              <polyline points={points.map((each) => each.at.join()).join(" ")} />
              {points.map(({ epoch, at: [cx, cy] }) => {
                const mark = body.unsafe.includes(epoch) ? "unsafe" : epoch === body.chosen ? "chosen" : null;
                return mark && <circle key={epoch} class={mark} cx={cx} cy={cy} r={3.5} />;
              })}
            </svg>
          </figure>
        );
      })}
    </div>
  );
}

const figure = (value: number) => (Number.isInteger(value) ? String(value) : value.toPrecision(3));

function Lines({ body }: { body: Body<"lines"> }) {
  const values = body.lines.flatMap((line) => line.values);
  const x = between(body.places[0]!, body.places.at(-1)!, 400);
  const y = between(Math.min(...values), Math.max(...values), 140);
  const ends = [body.places[0]!, body.places.at(-1)!].map(figure).join(" to ");
  return (
    <figure class="lines">
      <figcaption>
        {body.lines.map(({ name }, i) => (
          <span key={name} class={`line-${i}`}>
            {name}
          </span>
        ))}
      </figcaption>
      <svg viewBox="-4 -4 408 148" role="img" aria-label={`${body.lines.map(({ name }) => name).join(", ")}, over ${body.across}`}>
        {body.lines.map(({ name, values }, i) => (
          <polyline key={name} class={`line-${i}`} points={values.map((value, at) => [x(body.places[at]!), 140 - y(value)].join()).join(" ")} />
        ))}
      </svg>
      <div class="hint">{`${body.across}, ${ends}; from ${figure(Math.min(...values))} to ${figure(Math.max(...values))}`}</div>
    </figure>
  );
}

function HeatMap({ body }: { body: Body<"heat-map"> }) {
  return (
    <table class="heat">
      <thead>
        <tr>
          <th scope="col" />
          {body.rows.map((row) => (
            <th key={row} scope="col" class="number">
              {row}
            </th>
          ))}
        </tr>
      </thead>
      <tbody>
        {[...body.columns, body.overall].map((column, i) => (
          <tr key={column}>
            <th scope="row">{column}</th>
            {(body.shares[i] ?? body.means).map((share, row) => (
              <Share key={body.rows[row]} share={share} />
            ))}
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function Share({ share, digits = 0 }: { share: number; digits?: number }) {
  const width = percent(Math.max(0, Math.min(1, share))).replace(" ", "");
  return (
    <td class="number">
      <span class="heat-bar" style={{ width }} />
      <span class="heat-text">{percent(share, digits)}</span>
    </td>
  );
}

function Bars({ body }: { body: Body<"bars"> }) {
  return (
    <table class="heat">
      <tbody>
        {body.rows.map(({ name, share, own }) => (
          <tr key={name} class={own ? "own" : ""}>
            <th scope="row">{name}</th>
            <Share share={share} digits={1} />
          </tr>
        ))}
      </tbody>
    </table>
  );
}

const signed = (value: number) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(3)}`;

function Forest({ body }: { body: Body<"forest"> }) {
  const x = between(Math.min(0, ...body.rows.map((row) => row.low)), Math.max(0, ...body.rows.map((row) => row.high)), 200);
  return (
    <table class="forest">
      <tbody>
        {body.rows.map(({ name, value, low, high, own }) => (
          <tr key={name} class={own ? "own" : ""}>
            <th scope="row">{name}</th>
            <td class="plot">
              <svg viewBox="-6 0 212 20" aria-hidden="true">
                <line class="zero" x1={x(0)} x2={x(0)} y1={0} y2={20} />
                <line x1={x(low)} x2={x(high)} y1={10} y2={10} />
                <circle cx={x(value)} cy={10} r={4} />
              </svg>
            </td>
            <td class="number">
              {signed(value)} <span class="hint">{`${signed(low)} to ${signed(high)}`}</span>
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function Table({ body }: { body: Body<"table"> }) {
  const texts = body.columns.length - body.figures;
  return (
    <table>
      <thead>
        <tr>
          {body.columns.map((title, i) => (
            <th key={title} scope="col" class={i < texts ? "" : "number"}>
              {title}
            </th>
          ))}
        </tr>
      </thead>
      <tbody>
        {body.rows.map((row) => (
          <tr key={row.name}>
            <th scope="row">
              {row.name} {row.mark && <span class="chip accent">{row.mark}</span>}
            </th>
            {row.cells.map((cell, i) => (
              <td key={i} class={i + 1 < texts ? "" : "number"}>
                {cell}
              </td>
            ))}
          </tr>
        ))}
      </tbody>
    </table>
  );
}
