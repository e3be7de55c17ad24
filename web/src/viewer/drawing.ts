/**
 * Draw a mask on the scan of a viewer, by pointer or by keyboard.
 *
 * NiiVue keeps the drawing in canonical order. It is read from masks and written to them on the scan's own grid.
 */
import { signal } from "@preact/signals";
import { cmapper, PEN_TYPE } from "@niivue/niivue";
import { voxelsOf } from "./nifti";
import type { Layout } from "./layouts";
import type { ColourTable } from "./palette";
import type { Viewer } from "./viewer";

export type Tool = "move" | "brush" | "outline" | "rectangle" | "ellipse" | "eraser";

const PENS: Partial<Record<Tool, PEN_TYPE>> = { rectangle: PEN_TYPE.RECTANGLE, ellipse: PEN_TYPE.ELLIPSE };

/** The plane of the keyboard's strokes, and steps in it as voxels to the left (-) or right (+), ... of the patient. */
interface Plane {
  number: number;
  right: readonly [number, number, number];
  up: readonly [number, number, number];
  next: readonly [number, number, number];
}
// The patient's right is on the left of the screen.
const AXIAL: Plane = { number: 0, right: [-1, 0, 0], up: [0, 1, 0], next: [0, 0, 1] };
const CORONAL: Plane = { number: 1, right: [-1, 0, 0], up: [0, 0, 1], next: [0, 1, 0] };
const SAGITTAL: Plane = { number: 2, right: [0, 1, 0], up: [0, 0, 1], next: [1, 0, 0] };
const FLAT: Plane = { ...AXIAL, right: [1, 0, 0] };

export class Drawing {
  /** How many strokes can be undone. */
  readonly undoable = signal(0);
  /** Whether a person said that there is no target; what is drawn says otherwise. */
  private reviewed = false;
  private plane = AXIAL;
  private tool: Tool = "move";
  private value = 1;
  private width = 1;

  private constructor(private readonly viewer: Viewer) {}

  /** Begin with a mask on the scan's grid, or with an empty one. `onStroke` is called after every change. */
  static async begin(viewer: Viewer, mask: Blob | ArrayBuffer | null, onStroke: () => void): Promise<Drawing> {
    const drawing = new Drawing(viewer);
    const { niivue } = viewer;
    if (mask === null) niivue.createEmptyDrawing();
    else if (!niivue.loadDrawing(await viewer.read(mask, "mask.nii.gz"))) {
      throw new Error("The stored mask has another size than its scan: delete it, and draw it again.");
    }
    // A stored mask without a target says that the scan was reviewed.
    const wasReviewed = mask !== null && drawing.isEmpty;
    drawing.reviewed = wasReviewed;
    niivue.onDrawingChanged = (action) => {
      if (action !== "draw" && action !== "undo") return;
      if (action === "undo") drawing.reviewed = wasReviewed;
      else if (!drawing.isEmpty) drawing.reviewed = false;
      const most = niivue.opts.maxDrawUndoBitmaps - 1;
      drawing.undoable.value = action === "draw" ? Math.min(drawing.undoable.value + 1, most) : drawing.undoable.value - 1;
      onStroke();
    };
    return drawing;
  }

  colours(table: ColourTable, opacity: number): void {
    const { niivue } = this.viewer;
    niivue.drawLut = cmapper.makeDrawLut({ ...table, min: 0, max: table.I.length - 1 });
    niivue.refreshColormaps();
    niivue.setDrawOpacity(opacity);
  }

  /** Choose the tool, the value it draws, and the width of the brush in voxels. */
  choose(tool: Tool, value: number, width: number): void {
    const { niivue } = this.viewer;
    this.tool = tool;
    this.value = value;
    this.width = width;
    // The lines of shapes are thin: a wide one would cover more than what the pointer went round.
    niivue.opts.penSize = tool === "brush" || tool === "eraser" ? width : 1;
    niivue.opts.penType = PENS[tool] ?? PEN_TYPE.PEN;
    niivue.setPenValue(tool === "eraser" ? 0 : value, tool === "outline");
    niivue.setDrawingEnabled(tool !== "move");
  }

  /** The plane in which the keyboard moves and draws. */
  layout(layout: Layout, flat: boolean): void {
    this.plane = flat ? FLAT : layout === "coronal" ? CORONAL : layout === "sagittal" ? SAGITTAL : AXIAL;
  }

  move(direction: "right" | "up" | "next", steps: 1 | -1): void {
    const [x, y, z] = this.plane[direction];
    this.viewer.niivue.moveCrosshairInVox(steps * x, steps * y, steps * z);
  }

  /** One stroke of the brush, or of the eraser, at the cross-hair. */
  stroke(): void {
    const { niivue } = this.viewer;
    const [x, y, z] = niivue.frac2vox(niivue.scene.crosshairPos);
    const { penSize } = niivue.opts;
    niivue.opts.penSize = this.width;
    niivue.drawPenAxCorSag = this.plane.number;
    niivue.drawPt(x!, y!, z!, this.tool === "eraser" ? 0 : this.value);
    niivue.drawPenAxCorSag = -1;
    niivue.opts.penSize = penSize;
    this.done();
  }

  undo(): void {
    if (this.undoable.value > 0) this.viewer.niivue.drawUndo();
  }

  /** Say that there is no target: erase everything, in one stroke. */
  noTarget(): void {
    if (!this.isEmpty) {
      this.viewer.niivue.drawBitmap!.fill(0);
      this.done();
    }
    this.reviewed = true;
  }

  /** Whether nothing is drawn, and no person said that there is nothing to draw: then the scan has no mask. */
  get saysNothing(): boolean {
    return this.isEmpty && !this.reviewed;
  }

  private get isEmpty(): boolean {
    return this.viewer.niivue.drawBitmap!.every((value) => value === 0);
  }

  /** The mask as .nii.gz on the scan's own grid. The drawing may change, or be closed, once this was called. */
  async nifti(): Promise<Blob> {
    const { drawBitmap, volumes } = this.viewer.niivue;
    const content = await volumes[0]!.saveToUint8Array("mask.nii.gz", drawBitmap);
    return new Blob([content as Uint8Array<ArrayBuffer>]);
  }

  /** The mask of a picture, row by row from the top. */
  rows(): Uint8Array {
    const { drawBitmap, volumes } = this.viewer.niivue;
    return voxelsOf(volumes[0]!.toUint8Array(drawBitmap));
  }

  private done(): void {
    const { niivue } = this.viewer;
    niivue.drawAddUndoBitmap();
    niivue.refreshDrawing(true);
    niivue.onDrawingChanged("draw");
  }
}
