/**
 * Draw a mask on the scan of a viewer, by pointer or by keyboard.
 *
 * NiiVue keeps the drawing in canonical order. It is read from masks and written to them on the scan's own grid.
 */
import { signal } from "@preact/signals";
import { type NVImage, PEN_TYPE } from "@niivue/niivue";
import type { Plane } from "./layouts";
import { brush, fill, fillBetween, type Grid, type May, type Point, smooth } from "./morphology";
import { voxelsOf } from "./nifti";
import type { ColourTable } from "./palette";
import type { Viewer } from "./viewer";

export type Tool = "move" | "brush" | "outline" | "rectangle" | "ellipse" | "fill" | "eraser";

const PENS: Partial<Record<Tool, PEN_TYPE>> = { rectangle: PEN_TYPE.RECTANGLE, ellipse: PEN_TYPE.ELLIPSE };
/** Strokes that can be undone. */
const MOST_STROKES = 31;

/** What a stroke may change. */
export interface Limits {
  /** Values that stay as they are. */
  locked: ReadonlySet<number>;
  /** Intensities on which is drawn; null: all. Erasing takes all. */
  only: readonly [number, number] | null;
}

export class Drawing {
  /** How many strokes can be undone, and done again. */
  readonly undoable = signal(0);
  readonly redoable = signal(0);
  /** Why the last wish changed nothing; empty if it did. */
  readonly said = signal("");
  /** Whether a person said that there is no target; what is drawn says otherwise. */
  private reviewed = false;
  private tool: Tool = "move";
  private value = 1;
  private limits: Limits = { locked: new Set(), only: null };
  /** What was drawn before the present stroke. */
  private before = new Uint8Array();
  private intensities: ArrayLike<number> | null = null;
  /** Where the pointer went down, in pixels of the canvas. */
  private pressed: readonly [number, number] | null = null;

  private constructor(
    private readonly viewer: Viewer,
    /** Whether what is drawn is a proposal, which nobody has taken or changed. */
    private isProposal: boolean,
    private readonly onStroke: () => void,
  ) {}

  /**
   * Begin with a mask on the scan's grid, or with an empty one. `onStroke` is called after every change.
   *
   * `isProposal`: a model drew the mask, and so nothing is there to save before a person has taken or changed it.
   */
  static begin(viewer: Viewer, mask: NVImage | null, isProposal: boolean, onStroke: () => void): Drawing {
    const drawing = new Drawing(viewer, isProposal, onStroke);
    const { niivue } = viewer;
    // The limits of a drawing before.
    Reflect.deleteProperty(niivue, "drawAddUndoBitmap");
    if (mask === null) niivue.createEmptyDrawing();
    else if (!niivue.loadDrawing(mask)) {
      throw new Error("The mask has another size than its scan: delete it, and draw it again.");
    }
    drawing.before = niivue.drawBitmap!.slice();
    // A stored mask without a target says that the scan was reviewed.
    const wasReviewed = mask !== null && !isProposal && drawing.isEmpty;
    drawing.reviewed = wasReviewed;
    niivue.onDrawingChanged = (action) => {
      if (action !== "draw" && action !== "undo") return;
      drawing.before = niivue.drawBitmap!.slice();
      drawing.said.value = "";
      if (action === "undo") drawing.reviewed = wasReviewed;
      else {
        if (!drawing.isEmpty) drawing.reviewed = false;
        // Undo will not come back to it.
        if (drawing.undoable.peek() === MOST_STROKES) drawing.isProposal = false;
        drawing.undoable.value = Math.min(drawing.undoable.value + 1, MOST_STROKES);
        drawing.redoable.value = 0;
      }
      onStroke();
    };
    drawing.takeOver();
    return drawing;
  }

  /** Draw with a round brush in millimetres, and within limits: NiiVue's is a square of voxels, and knows no limits. */
  private takeOver(): void {
    const { niivue } = this.viewer;
    const [line, plane] = [this.line.bind(this), () => niivue.drawPenAxCorSag as Plane["number"]];
    niivue.drawPt = (x, y, z, value) => line(plane(), [x, y, z], [x, y, z], value);
    niivue.drawPenLine = (from, to, value) => line(plane(), from as unknown as Point, to as unknown as Point, value);
    const add = Object.getPrototypeOf(niivue).drawAddUndoBitmap.bind(niivue) as () => void;
    niivue.drawAddUndoBitmap = () => {
      this.restrict();
      add();
      niivue.refreshDrawing(true);
    };
    const { canvas } = this.viewer;
    this.viewer.onSecondFinger = this.drop.bind(this);
    canvas.onpointerdown = ({ button, isPrimary, offsetX, offsetY }) =>
      (this.pressed = button === 0 && isPrimary ? [offsetX, offsetY] : null);
    canvas.onpointerup = ({ offsetX, offsetY }) => {
      const isClick = this.pressed !== null && Math.hypot(offsetX - this.pressed[0], offsetY - this.pressed[1]) < 5;
      if (isClick && this.tool === "fill") this.fillAt([offsetX, offsetY]);
    };
  }

  /** Drop the stroke that a finger has begun. */
  private drop(): void {
    const { niivue } = this.viewer;
    const nowhere = () => [NaN, NaN, NaN] as typeof niivue.drawPenLocation;
    this.pressed = null;
    niivue.drawBitmap!.set(this.before);
    niivue.drawPenLocation = nowhere();
    niivue.drawShapeStartLocation = nowhere();
    niivue.drawShapePreviewBitmap = null;
    niivue.drawPenFillPts = [];
    niivue.drawPenAxCorSag = -1;
    niivue.refreshDrawing(true);
  }

  private line(plane: Plane["number"], from: Point, to: Point, value: number): void {
    // The line of an outline is thin: a wide one would cover more than what the pointer went round.
    brush(this.grid, plane, from, to, this.tool === "outline" ? 0 : this.width, value, this.may);
  }

  private get grid(): Grid {
    const { back, drawBitmap } = this.viewer.niivue;
    const [, columns, rows, slices] = back!.dimsRAS!;
    const [, x, y, z] = back!.pixDimsRAS!;
    return { voxels: drawBitmap!, size: [columns!, rows!, slices!], spacing: [x!, y!, z!] };
  }

  /** Whether the limits let a voxel become a value. */
  private readonly may: May = (index, value) => {
    const { locked, only } = this.limits;
    if (locked.has(this.before[index]!)) return false;
    if (only === null || value === 0) return true;
    const volume = this.viewer.niivue.volumes[0]!;
    this.intensities ??= volume.img2RAS();
    const intensity = this.intensities[index]! * (volume.hdr!.scl_slope || 1) + (volume.hdr!.scl_inter || 0);
    return intensity >= only[0] && intensity <= only[1];
  };

  /** Take back what a stroke changed beyond the limits. */
  private restrict(): void {
    if (this.limits.locked.size === 0 && this.limits.only === null) return;
    const now = this.viewer.niivue.drawBitmap!;
    for (let i = 0; i < now.length; i++) {
      if (now[i] !== this.before[i] && !this.may(i, now[i]!)) now[i] = this.before[i]!;
    }
  }

  colours(table: ColourTable, opacity: number, isOutlined: boolean): void {
    this.viewer.drawingColours(table, opacity, isOutlined);
  }

  private width = 1;

  /** The finest brush, in millimetres, or pixels of a picture. */
  get finest(): number {
    return Math.min(...this.grid.spacing.slice(0, 2));
  }

  /** Choose the tool, the value it draws, the width of the brush in millimetres (pixels of a picture), and what may change. */
  choose(tool: Tool, value: number, width: number, limits: Limits): void {
    const { niivue } = this.viewer;
    this.tool = tool;
    this.value = value;
    this.width = width;
    this.limits = limits;
    niivue.opts.penSize = 1;
    niivue.opts.penType = PENS[tool] ?? PEN_TYPE.PEN;
    niivue.setPenValue(tool === "eraser" ? 0 : value, tool === "outline");
    niivue.setDrawingEnabled(tool !== "move" && tool !== "fill");
  }

  /** One stroke of the brush, or of the eraser, at the cross-hair. */
  stroke(): void {
    const { niivue, plane } = this.viewer;
    const at = [...niivue.frac2vox(niivue.scene.crosshairPos)] as unknown as Point;
    brush(this.grid, plane.number, at, at, this.width, this.tool === "eraser" ? 0 : this.value, this.may);
    this.done();
  }

  /** Fill the area at a pixel of the canvas, or at the cross-hair. */
  fillAt(pixel?: readonly [number, number]): void {
    const { niivue } = this.viewer;
    const [x, y] = (pixel ?? [-1, -1]).map((each) => each * devicePixelRatio);
    const tile = niivue.screenSlices[niivue.tileIndex(x!, y!)];
    if (pixel && (tile === undefined || tile.axCorSag > 2)) return;
    const plane = pixel ? (tile!.axCorSag as Plane["number"]) : this.viewer.plane.number;
    const at = niivue.frac2vox(pixel ? niivue.canvasPos2frac([x!, y!]) : niivue.scene.crosshairPos);
    if (fill(this.grid, plane, [...at] as unknown as Point, this.value)) this.done();
    else this.said.value = "This area is open to the side of the picture: close its outline first.";
  }

  /** Draw the label between the slices of the plane that have it. */
  fillBetween(): void {
    if (fillBetween(this.grid, this.viewer.plane.number, this.value) > 0) this.done();
    else this.said.value = "Draw the label on two slices of this plane, with slices between them.";
  }

  smooth(): void {
    smooth(this.grid, this.viewer.plane.number, this.value);
    this.done();
  }

  undo(): void {
    if (this.undoable.value === 0) return;
    this.undoable.value -= 1;
    this.redoable.value += 1;
    this.viewer.niivue.drawUndo();
  }

  redo(): void {
    if (this.redoable.value === 0) return;
    const { niivue } = this.viewer;
    this.undoable.value += 1;
    this.redoable.value -= 1;
    // NiiVue keeps strokes in a ring, and goes back in it: from one after the next.
    const next = (niivue.currentDrawUndoBitmap + 1) % niivue.opts.maxDrawUndoBitmaps;
    niivue.currentDrawUndoBitmap = next + 1;
    niivue.drawUndo();
  }

  /** Say that there is no target: erase everything, in one stroke. */
  noTarget(): void {
    if (!this.isEmpty) {
      this.viewer.niivue.drawBitmap!.fill(0);
      this.done();
    }
    this.reviewed = true;
  }

  /** Whether what is shown is a proposal as it came. */
  get isUntouched(): boolean {
    return this.isProposal && this.undoable.value === 0;
  }

  /** Take the proposal as it is. */
  accept(): void {
    this.isProposal = false;
    this.reviewed = this.isEmpty;
    this.onStroke();
  }

  /** Whether nothing is to be saved: nothing is drawn, or nothing but a proposal, and no person said that this is right. */
  get saysNothing(): boolean {
    return (this.isEmpty && !this.reviewed) || this.isUntouched;
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
