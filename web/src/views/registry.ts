/** The views of the page. Each is a module of its own, loaded when it is first opened. */
import type { FunctionComponent } from "preact";
import type { Role } from "../app/session";

export interface View {
  name: string;
  title: string;
  /** The least roles that have something to do there. */
  roles: readonly Role[];
  load: () => Promise<{ default: FunctionComponent }>;
}

export const VIEWS: readonly View[] = [
  { name: "look", title: "Look", roles: ["reader"], load: () => import("./look/look") },
  { name: "adapt", title: "Adapt", roles: ["reader"], load: () => import("./adapt/adapt") },
  { name: "draw", title: "Draw", roles: ["operator"], load: () => import("./draw/draw") },
  { name: "watch", title: "Watch", roles: ["reader"], load: () => import("./watch/watch") },
  { name: "oversee", title: "Oversee", roles: ["reader", "federation"], load: () => import("./oversee/oversee") },
];
