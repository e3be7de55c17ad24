/** Where each version is drawn: what it descends from is in a column to the left of it. */
import type { Schema } from "../../api/client";

export type Version = Schema<"LineageVersion">;

export interface Node {
  reference: string;
  version: Version;
  /** References of the nodes that it was made from or is composed of. */
  parents: string[];
  column: number;
  row: number;
}

export interface Graph {
  nodes: Node[];
  columns: number;
  rows: number;
}

export const referenceOf = ({ name, version }: Pick<Version, "name" | "version">): string => `${name}@${version}`;

/** The versions that can be asked for, without their parts. `shown` leaves some out. */
export function graphOf(versions: readonly Version[], shown: (node: Node) => boolean = () => true): Graph {
  const offered = versions.filter((each) => each.part_of === null);
  const all = offered.map((version): Node => ({
    reference: referenceOf(version),
    version,
    parents: ancestorsOf(version, offered),
    column: 0,
    row: 0,
  }));
  const nodes = all.filter(shown).sort((a, b) => a.version.name.localeCompare(b.version.name) || a.version.version - b.version.version);
  const byReference = new Map(nodes.map((node) => [node.reference, node]));
  for (const node of nodes) node.parents = node.parents.filter((parent) => byReference.has(parent));
  const columnOf = (node: Node): number => Math.max(0, ...node.parents.map((parent) => 1 + columnOf(byReference.get(parent)!)));
  const placed = new Set<Node>();
  let rows = 0;
  // A node is beside the first of its children, and a node without children takes the next row.
  const place = (node: Node): number => {
    if (placed.has(node)) return node.row;
    placed.add(node);
    const children = nodes.filter((each) => each.parents[0] === node.reference);
    const found = children.map(place);
    node.row = found[0] ?? rows++;
    return node.row;
  };
  for (const node of nodes) node.column = columnOf(node);
  for (const node of nodes) if (node.parents.length === 0) place(node);
  return { nodes, columns: Math.max(0, ...nodes.map((node) => node.column + 1)), rows };
}

/** An ancestor that is a part is drawn as the composite: the newest that had it when the version was made. */
function ancestorsOf(version: Version, offered: readonly Version[]): string[] {
  const found = new Set<string>();
  for (const ancestor of [...version.parents, ...version.parts]) {
    const itself = offered.find((each) => referenceOf(each) === ancestor);
    const composites = offered.filter((each) => each.parts.includes(ancestor) && each.published <= version.published);
    const drawn = itself ?? composites.filter((each) => each !== version).at(-1);
    if (drawn && !(version.parts.includes(ancestor) && drawn.name === version.name)) found.add(referenceOf(drawn));
  }
  return [...found];
}
