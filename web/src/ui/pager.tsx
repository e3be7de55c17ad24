/** A long list, a page at a time. */
import { useEffect, useState } from "preact/hooks";

/** The rows of the page that is open, and the buttons to the others: none where one page has all. */
export function usePage<R>(rows: readonly R[], size: number, label: string) {
  const [page, setPage] = useState(0);
  const last = Math.max(0, Math.ceil(rows.length / size) - 1);
  useEffect(() => {
    if (page > last) setPage(last);
  }, [page, last]);
  const first = Math.min(page, last) * size;
  const shown = rows.slice(first, first + size);
  const pager = last > 0 && (
    <div class="row" role="group" aria-label={label}>
      <button type="button" class="button small" disabled={page === 0} onClick={() => setPage(page - 1)}>
        Before
      </button>
      <span class="soft" aria-live="polite">
        {first + 1} to {first + shown.length} of {rows.length}
      </span>
      <button type="button" class="button small" disabled={page >= last} onClick={() => setPage(page + 1)}>
        Next
      </button>
    </div>
  );
  return { shown, pager, open: (row: number) => setPage(Math.max(0, Math.floor(row / size))) };
}
