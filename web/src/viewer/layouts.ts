/** Which planes a viewer shows. */

export type Layout = "planes" | "axial" | "coronal" | "sagittal" | "render";

export const LAYOUTS: readonly { value: Layout; label: string }[] = [
  { value: "planes", label: "All planes" },
  { value: "axial", label: "Axial" },
  { value: "coronal", label: "Coronal" },
  { value: "sagittal", label: "Sagittal" },
  { value: "render", label: "3-D" },
];
