/** Which planes a viewer shows. */

export type Layout = "planes" | "axial" | "coronal" | "sagittal" | "render";

export const LAYOUTS: readonly { value: Layout; label: string }[] = [
  { value: "planes", label: "All planes" },
  { value: "axial", label: "Axial" },
  { value: "coronal", label: "Coronal" },
  { value: "sagittal", label: "Sagittal" },
  { value: "render", label: "3-D" },
];

/** A plane as NiiVue numbers it, and steps on the screen as voxels in canonical order (to the patient's left, front and head). */
export interface Plane {
  number: 0 | 1 | 2;
  right: readonly [number, number, number];
  up: readonly [number, number, number];
  next: readonly [number, number, number];
}

export type Direction = "right" | "up" | "next";

// As radiologists read them: the patient's right and front are on the left of the screen.
const AXIAL: Plane = { number: 0, right: [-1, 0, 0], up: [0, 1, 0], next: [0, 0, 1] };
const CORONAL: Plane = { number: 1, right: [-1, 0, 0], up: [0, 0, 1], next: [0, 1, 0] };
const SAGITTAL: Plane = { number: 2, right: [0, -1, 0], up: [0, 0, 1], next: [1, 0, 0] };
const FLAT: Plane = { ...AXIAL, right: [1, 0, 0] };

/** The plane in which keys move. `flat`: a picture, which has no sides of a patient. */
export const planeOf = (layout: Layout, flat: boolean): Plane =>
  flat ? FLAT : layout === "coronal" ? CORONAL : layout === "sagittal" ? SAGITTAL : AXIAL;

/** The layout of one of the planes, by its number. */
export const LAYOUT_OF = ["axial", "coronal", "sagittal"] as const;

/** The axes of a plane, of a volume's three. */
export const AXES = [
  [0, 1],
  [0, 2],
  [1, 2],
] as const;
