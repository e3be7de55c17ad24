/** What stands in the place of content: it is being read, or there is none. What went wrong is a `Rejection`. */
import type { ComponentChildren } from "preact";

/** `what`: such as "the versions". Lines hold its place; it appears only where reading takes a moment. */
export function Loading({ what = "" }: { what?: string }) {
  return (
    <div class="loading" role="status">
      <span>{`Loading ${what}`.trimEnd()} …</span>
      <span class="loading-lines" aria-hidden="true" />
    </div>
  );
}

/** In the place of a whole view, of which a screen reader hears the title. */
export function Whole({ title, children }: { title: string; children: ComponentChildren }) {
  return (
    <div class="center">
      <h1 class="visually-hidden">{title}</h1>
      {children}
    </div>
  );
}

/** `children`: what to do to have some. */
export function Empty({ title, children }: { title: string; children?: ComponentChildren }) {
  return (
    <div class="empty">
      <svg width="28" height="28" viewBox="0 0 28 28" aria-hidden="true">
        <rect x="3" y="5" width="22" height="18" rx="4" />
        <path d="M3 16 h6 l2 3 h6 l2 -3 h6" />
      </svg>
      <strong>{title}</strong>
      {children && <div>{children}</div>}
    </div>
  );
}
