/** A table by its columns. It scrolls sideways where it is too wide. */
import type { ComponentChildren, Key } from "preact";

export interface Column<R> {
  title: string;
  /** Right-aligned figures. */
  number?: boolean;
  /** The column that names the row. */
  head?: boolean;
  cell: (row: R) => ComponentChildren;
}

export function Table<R>(given: { rows: readonly R[]; columns: readonly Column<R>[]; keyOf: (row: R) => Key; class?: string }) {
  const { rows, columns, keyOf } = given;
  return (
    <div class="scroll">
      <table class={given.class}>
        <thead>
          <tr>
            {columns.map((column) => (
              <th key={column.title} scope="col" class={column.number ? "number" : undefined}>
                {column.title}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <tr key={keyOf(row)}>
              {columns.map((column) =>
                column.head ? (
                  <th key={column.title} scope="row">
                    {column.cell(row)}
                  </th>
                ) : (
                  <td key={column.title} class={column.number ? "number" : undefined}>
                    {column.cell(row)}
                  </td>
                ),
              )}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
