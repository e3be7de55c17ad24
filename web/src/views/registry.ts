/** The views of the page. Each is a module of its own, loaded when it is first opened. */
import type { FunctionComponent } from "preact";
import type { Role } from "../app/session";

export interface View {
  name: string;
  title: string;
  /** The least role that has something to do there. */
  role: Role;
  load: () => Promise<{ default: FunctionComponent }>;
}

export const VIEWS: readonly View[] = [
  { name: "look", title: "Look", role: "reader", load: () => import("./look/look") },
  { name: "adapt", title: "Adapt", role: "reader", load: () => import("./adapt/adapt") },
  { name: "draw", title: "Draw", role: "operator", load: () => import("./draw/draw") },
  { name: "oversee", title: "Oversee", role: "reader", load: () => import("./oversee/oversee") },
];
