/** Typed requests to the service. Types come from `openapi.yaml` (`make web`). */
import { signal } from "@preact/signals";
import type { components, paths } from "./schema";

export type Schema<N extends keyof components["schemas"]> = components["schemas"][N];

type Method = "get" | "put" | "post" | "patch" | "delete";
type Operation<P extends keyof paths, M extends Method> = Exclude<paths[P][M], undefined>;
type PathOf<O> = O extends { parameters: { path: infer X } } ? { path: X } : { path?: never };
type QueryOf<O> = O extends { parameters: { query?: infer X } } ? { query?: X } : { query?: never };
type JsonOf<O> = O extends { requestBody?: { content: { "application/json": infer B } } } ? { json?: B } : { json?: never };
type ContentOf<R> = R extends { content: infer C } ? ("application/json" extends keyof C ? C["application/json"] : unknown) : undefined;
type Data<O> = O extends { responses: infer R }
  ? { [S in keyof R]: S extends 200 | 201 | 202 | 204 ? ContentOf<R[S]> : never }[keyof R]
  : never;

interface Sending {
  headers?: Record<string, string>;
  /** A form or a file, where the operation takes no JSON. */
  body?: FormData | Blob;
  signal?: AbortSignal;
  /** Share of the body that was sent, 0 to 1. */
  onSent?: (share: number) => void;
  /** Share of the answer that was received, where its size is known. A 202 is no answer yet. */
  onReceived?: (share: number) => void;
}

export interface Reply<T> {
  data: T;
  status: number;
  headers: Headers;
}

/** A rejection by the service (RFC 9457). */
export class Problem extends Error {
  override readonly name = "Problem";
  constructor(
    readonly status: number,
    /** Short name, such as `gate-refused`. */
    readonly slug: string,
    readonly title: string,
    readonly detail: string,
    /** What else the document has. */
    readonly members: Record<string, unknown>,
  ) {
    super(title);
  }
}

/** The token against forgery of the session's cookie. */
export const csrf = signal<string | null>(null);

/** A path with its parameters filled in. */
export function fill(path: string, values: Record<string, unknown> = {}, query: Record<string, unknown> = {}): string {
  const filled = path.replace(/\{(\w+)\}/g, (_, name: string) => encodeURIComponent(String(values[name])));
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== undefined && value !== null) search.set(name, String(value));
  }
  const text = search.toString();
  // Relative, so that the page works below any prefix.
  return filled.slice(1) + (text ? `?${text}` : "");
}

/** Send a request and return its JSON. Throws Problem for a rejection. */
export async function call<P extends keyof paths, M extends Method & keyof paths[P]>(
  method: M,
  path: P,
  given: PathOf<Operation<P, M>> & QueryOf<Operation<P, M>> & JsonOf<Operation<P, M>> & Sending = {} as never,
): Promise<Reply<Data<Operation<P, M>>>> {
  const { path: values, query, json, ...sending } = given as Sending & {
    path?: Record<string, unknown>;
    query?: Record<string, unknown>;
    json?: unknown;
  };
  const body = json === undefined ? sending.body : new Blob([JSON.stringify(json)], { type: "application/json" });
  const answer = await send(method, fill(path, values, query), { ...sending, ...(body ? { body } : {}) });
  // An answer without content may have a type.
  const isJson = answer.status !== 204 && answer.headers.get("content-type")?.startsWith("application/json");
  const data = (isJson ? await answer.json() : undefined) as Data<Operation<P, M>>;
  return { data, status: answer.status, headers: answer.headers };
}

/** Every page of a list, one after the other. `read` asks for the page after a cursor. */
export async function pagesOf<T extends { next: string | null }>(
  read: (cursor: { after?: string }) => Promise<Reply<T>>,
): Promise<T[]> {
  const found: T[] = [];
  for (let after: string | null | undefined; after !== null; after = found.at(-1)!.next ?? null) {
    found.push((await read(after === undefined ? {} : { after })).data);
  }
  return found;
}

/** Send a request and return the answer as it came. Throws Problem for a rejection. */
export async function send(method: Method, url: string, given: Sending = {}): Promise<Response> {
  const headers: Record<string, string> = { ...given.headers };
  if (csrf.peek() !== null && method !== "get" && !headers.Authorization) headers["Locum-CSRF"] = csrf.peek()!;
  let answer: Response;
  try {
    answer = given.onSent || given.onReceived
      ? await sendWithProgress(method, url, headers, given)
      : await fetch(url, {
          method: method.toUpperCase(),
          headers,
          credentials: "same-origin",
          ...(given.body ? { body: given.body } : {}),
          ...(given.signal ? { signal: given.signal } : {}),
        });
  } catch (error) {
    if (given.signal?.aborted) throw error;
    throw unreachable(0);
  }
  if (answer.ok) return answer;
  throw await problemOf(answer);
}

const UNREACHABLE = "unreachable";

/** Whether the service did not answer: it does not run, or the connection is lost. */
export const isUnreachable = (error: unknown): boolean => error instanceof Problem && error.slug === UNREACHABLE;

/** `status`: what a proxy answered in the service's place, or 0. */
function unreachable(status: number): Problem {
  window.dispatchEvent(new Event("locum:unreachable"));
  return new Problem(status, UNREACHABLE, "The service did not answer", "Try again once it does.", {});
}

async function problemOf(answer: Response): Promise<Problem> {
  let found: Record<string, unknown> = {};
  try {
    found = (await answer.json()) as Record<string, unknown>;
  } catch {
    // A proxy's own page.
    if ([502, 503, 504].includes(answer.status)) return unreachable(answer.status);
  }
  const slug = String(found.type ?? "").replace("urn:locum:problem:", "");
  if (answer.status === 401) window.dispatchEvent(new Event("locum:unauthenticated"));
  const title = typeof found.title === "string" ? found.title : `The service answered ${answer.status}`;
  const detail = typeof found.detail === "string" ? found.detail : answer.statusText;
  return new Problem(answer.status, slug, title, detail, found);
}

/** `fetch` reports no progress. */
function sendWithProgress(method: string, url: string, headers: Record<string, string>, given: Sending): Promise<Response> {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open(method.toUpperCase(), url);
    request.responseType = "blob";
    for (const [name, value] of Object.entries(headers)) request.setRequestHeader(name, value);
    request.upload.onprogress = (event) => event.lengthComputable && given.onSent?.(event.loaded / event.total);
    request.onprogress = (event) => {
      if (event.lengthComputable && request.status !== 202) given.onReceived?.(event.loaded / event.total);
    };
    request.onload = () => {
      const received = new Headers();
      for (const line of request.getAllResponseHeaders().trim().split(/\r?\n/)) {
        const colon = line.indexOf(":");
        if (colon > 0) received.append(line.slice(0, colon), line.slice(colon + 1).trim());
      }
      const body = [204, 205, 304].includes(request.status) ? null : (request.response as Blob);
      resolve(new Response(body, { status: request.status, statusText: request.statusText, headers: received }));
    };
    request.onerror = () => reject(new TypeError("the request failed"));
    request.onabort = () => reject(new DOMException("aborted", "AbortError"));
    given.signal?.addEventListener("abort", () => request.abort(), { once: true });
    request.send(given.body ?? null);
  });
}
