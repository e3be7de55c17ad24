/**
 * NiiVue on one canvas: a scan, and overlays on it.
 *
 * Planes are shown as radiologists read them, the patient's right on the left, and both sides are marked. A
 * picture without a position has no sides, and so no marks.
 */
import { cmapper, DRAG_MODE, MULTIPLANAR_TYPE, Niivue, type NiiVueLocation, NVImage, SHOW_RENDER, SLICE_TYPE } from "@niivue/niivue";
import { signal } from "@preact/signals";
import { follow } from "./gestures";
import { type Direction, type Layout, LAYOUT_OF, type Plane, planeOf } from "./layouts";
import { type ColourTable, DIFFERENCE } from "./palette";
import { type Statistics, statisticsOf } from "./statistics";

/** The values of a mask by name. */
type Names = Readonly<Record<string, number>>;

interface NamedMask {
  image: NVImage;
  names: Names;
}

/** The intensities that are shown as black and white, and those that the scan has. */
export interface Window extends Intensities {
  low: number;
  high: number;
}

interface Intensities {
  least: number;
  most: number;
  /** Without the extremes: what a scan is opened with. */
  usual: readonly [number, number];
}

/** What a person sees of a scan: it is kept from one view of the page to the next. */
export interface Sight {
  window: readonly [low: number, high: number];
  pan: readonly number[];
  crosshair: readonly number[];
}

/** A plane on the canvas. */
export interface Tile {
  left: number;
  top: number;
  width: number;
  height: number;
}

export type OverlayName = "drawn" | "mask" | "uncertainty" | "difference";

const SLICE_TYPES: Record<Layout, SLICE_TYPE> = {
  planes: SLICE_TYPE.MULTIPLANAR,
  axial: SLICE_TYPE.AXIAL,
  coronal: SLICE_TYPE.CORONAL,
  sagittal: SLICE_TYPE.SAGITTAL,
  render: SLICE_TYPE.RENDER,
};

const CROSSHAIR = 0.25;
export const MOST_ZOOM = 8;
/** A drag over so many pixels takes the window over the whole range of usual intensities. */
const WINDOW_DRAG = 400;
/** Outlines are drawn where something is drawn: this much of it cannot be seen. */
const UNSEEN = 0.004;
/** The share of voxels at either end that a scan is opened without; and how many voxels tell it. */
const EXTREMES = 0.01;
const MOST_SAMPLES = 200_000;
/** The dark line around a letter, in pixels: a letter is read on bright and dark ground. */
const OUTLINE = 1.5;
const DARK = [0.02, 0.035, 0.04, 1];
/** Pixels between a letter at the right edge and the edge. */
const EDGE = 6;

const RGB24 = 128;
/** As in other viewers; shift is for a mouse of two buttons. What `gestures` does is not here. */
const MOUSE = {
  leftButton: { primary: DRAG_MODE.crosshair, withShift: DRAG_MODE.pan },
  centerButton: DRAG_MODE.pan,
  rightButton: DRAG_MODE.windowing,
};

/** Overlays in the order in which they are drawn. */
const ORDER: readonly OverlayName[] = ["drawn", "mask", "uncertainty", "difference"];

export class Viewer {
  private scan: NVImage | null = null;
  /** The file of the scan that was asked for last: one that is read later must not cover it. */
  private wanted: Blob | ArrayBuffer | null = null;
  private isClosed = false;
  private leader: Viewer | null = null;
  private links: (() => void)[] = [];
  private intensities: Intensities = { least: 0, most: 1, usual: [0, 1] };
  /** The pixels of a picture in colour, as they came. */
  private colour: Uint8Array | null = null;
  private isOutlined = false;
  /** The mask of which the outlines are shown, and the colours of its values. */
  private outlined: NVImage | null = null;
  private maskTable: ColourTable = { R: [], G: [], B: [], A: [], I: [], labels: [] };
  private shownLayout: Layout = "planes";
  private isFlat = false;
  /** Whether a drag measures a length. */
  isMeasuring = false;
  /** Called when a second finger comes: what the first one began to draw is no stroke. */
  onSecondFinger: (() => void) | null = null;
  /** Where the planes are on the canvas, in its pixels. */
  readonly tiles = signal<readonly Tile[]>([]);
  /** Null where no scan is open. */
  readonly window = signal<Window | null>(null);
  /** How many times the planes are enlarged. */
  readonly zoomed = signal(1);
  /** Called when a person enlarges one of several planes, or goes back to all of them. */
  onLayout: ((layout: Layout) => void) | null = null;
  private readonly overlays = new Map<OverlayName, NVImage>();

  private constructor(
    /** For what this class has no words for: `Drawing`. */
    readonly niivue: Niivue,
    readonly canvas: HTMLCanvasElement,
  ) {}

  /** The canvas must be inside an element that has a size. */
  static async open(canvas: HTMLCanvasElement, describe?: (text: string) => void): Promise<Viewer> {
    const niivue = new Niivue({
      backColor: [0.02, 0.035, 0.04, 1],
      crosshairColor: [0.42, 0.77, 0.83, 0.9],
      fontColor: [0.87, 0.91, 0.92, 1],
      // Of the canvas: a voxel would be wide in a coarse scan.
      crosshairWidthUnit: "percent",
      crosshairWidth: CROSSHAIR,
      loadingText: "",
      dragAndDropEnabled: false,
      isRadiologicalConvention: true,
      // The patient's front is on the left, as in OHIF and Slicer.
      sagittalNoseLeft: true,
      showAllOrientationMarkers: true,
      isColorbar: false,
      isNearestInterpolation: true,
      multiplanarShowRender: SHOW_RENDER.ALWAYS,
      multiplanarLayout: MULTIPLANAR_TYPE.GRID,
      // With the right button: left and right changes the width, up and down the level.
      dragMode: DRAG_MODE.windowing,
      mouseEventConfig: MOUSE,
      // Yellow of the labels' colours: read on bright and dark ground.
      measureLineColor: [0.94, 0.89, 0.26, 1],
      measureTextColor: [0.94, 0.89, 0.26, 1],
      tileMargin: 6,
      // Letters that would change what the page's own controls show.
      viewModeHotKey: "",
      clipPlaneHotKey: "",
      cycleClipPlaneHotKey: "",
      maxDrawUndoBitmaps: 32,
      logLevel: "error",
    });
    // A stroke that leaves the canvas goes on, and ends where the pointer is released.
    canvas.addEventListener("pointerdown", (event) => canvas.setPointerCapture(event.pointerId));
    // NiiVue cuts the last pixels of a letter at the right edge.
    const drawTextLeft = niivue.drawTextLeft.bind(niivue);
    niivue.drawTextLeft = ([x = 0, y = 0], ...rest) => drawTextLeft([x - EDGE * devicePixelRatio, y], ...rest);
    const drawText = niivue.drawText.bind(niivue);
    niivue.drawText = ([x = 0, y = 0], text, scale, colour) => {
      const [width, half] = [OUTLINE * devicePixelRatio, OUTLINE * devicePixelRatio * Math.SQRT1_2];
      for (const [right, down] of [[width, 0], [-width, 0], [0, width], [0, -width], [half, half], [-half, half], [half, -half], [-half, -half]]) {
        drawText([x + right!, y + down!], text, scale, DARK);
      }
      drawText([x, y], text, scale, colour);
    };
    const viewer = new Viewer(niivue, canvas);
    const drawScene = niivue.drawScene.bind(niivue);
    niivue.drawScene = () => {
      const drawn = drawScene();
      viewer.noteTiles();
      return drawn;
    };
    follow(viewer, canvas);
    await niivue.attachToCanvas(canvas, false);
    if (describe) niivue.onLocationChange = (location) => describe(viewer.place(location as NiiVueLocation));
    return viewer;
  }

  /** Where the cross-hair is, and what the scan has there. */
  private place({ mm, vox, values }: NiiVueLocation): string {
    const sides = this.niivue.back?.dimsRAS;
    const value = values[0]?.value;
    if (this.scan === null || sides === undefined || value === undefined) return "";
    const intensity = `intensity ${Number(value.toPrecision(5))}`;
    const [i = 0, j = 0, k = 0] = vox;
    if (!this.niivue.opts.isOrientationTextVisible) return `column ${i + 1}, row ${sides[2]! - j} · ${intensity}`;
    const [x = 0, y = 0, z = 0] = mm;
    const side = (at: number, negative: string, positive: string) => `${Math.abs(at).toFixed(1)} ${at < 0 ? negative : positive}`;
    const slice = (plane: string, at: number, axis: number) => `${plane} ${at + 1} of ${sides[axis]}`;
    return [
      `${side(x, "L", "R")}, ${side(y, "P", "A")}, ${side(z, "I", "S")} mm`,
      intensity,
      [slice("axial", k, 3), slice("coronal", j, 2), slice("sagittal", i, 1)].join(", "),
    ].join(" · ");
  }

  /** Free the graphics memory at once; the garbage collector comes later. */
  close(): void {
    this.clear();
    this.isClosed = true;
    this.niivue.cleanup();
    this.canvas.getContext("webgl2")?.getExtension("WEBGL_lose_context")?.loseContext();
  }

  get hasScan(): boolean {
    return this.scan !== null;
  }

  clear(): void {
    if (this.isClosed) return;
    if (this.niivue.drawBitmap) {
      this.niivue.onDrawingChanged = () => undefined;
      this.niivue.setDrawingEnabled(false);
      this.niivue.closeDrawing();
    }
    this.onSecondFinger = null;
    this.overlays.clear();
    this.outlined = null;
    this.scan = null;
    this.wanted = null;
    this.colour = null;
    this.window.value = null;
    this.niivue.clearMeasurements();
    this.niivue.volumes = [];
    this.niivue.back = null;
    this.niivue.overlays = [];
    this.niivue.updateGLVolume();
  }

  /** Show a scan (NIfTI) and drop the one before. `flat`: a picture, which has no patient's sides. */
  async show(scan: Blob | ArrayBuffer, flat: boolean): Promise<void> {
    this.clear();
    this.wanted = scan;
    const opts = this.niivue.opts;
    opts.isRadiologicalConvention = !flat;
    opts.isOrientationTextVisible = !flat;
    opts.crosshairWidth = flat ? 0 : CROSSHAIR;
    const image = await volume(scan, "scan.nii.gz");
    if (this.isClosed || this.wanted !== scan) return;
    this.scan = image;
    this.isFlat = flat;
    this.niivue.addVolume(this.scan);
    this.colour = image.hdr?.datatypeCode === RGB24 ? Uint8Array.from(image.img!) : null;
    this.intensities = intensitiesOf(image);
    // A picture is shown as it is.
    if (flat) this.intensities = { ...this.intensities, usual: [0, 255] };
    // It has no millimetres.
    this.niivue.opts.showMeasureUnits = !flat;
    this.niivue.setPan2Dxyzmm([0, 0, 0, 1]);
    this.zoomed.value = 1;
    if (this.colour) this.noteWindow(0, 255);
    else this.setWindow();
    if (this.leader?.hasScan) this.crosshairTo(this.leader.niivue.scene.crosshairPos);
    // Where it is stands below the picture from the start.
    this.niivue.createOnLocationChange();
  }

  private noteTiles(): void {
    const found = this.niivue.screenSlices.map(({ leftTopWidthHeight }): Tile => {
      const [left, top, width, height] = leftTopWidthHeight.map((each) => each / devicePixelRatio);
      return { left: left!, top: top!, width: width!, height: height! };
    });
    if (JSON.stringify(found) !== JSON.stringify(this.tiles.peek())) this.tiles.value = found;
  }

  /** A picture has no slices. */
  get isPicture(): boolean {
    return this.isFlat;
  }

  /** Forget the drag that the first finger began: a second one came. */
  dropDrag(): void {
    this.onSecondFinger?.();
    this.niivue.setDragStart(0, 0);
    this.niivue.setDragEnd(0, 0);
    if (this.isMeasuring) this.niivue.uiData.isDragging = false;
  }

  layout(layout: Layout): void {
    this.shownLayout = layout;
    if (!this.isClosed) this.niivue.setSliceType(SLICE_TYPES[layout]);
  }

  /** The plane in which keys move and draw. */
  get plane(): Plane {
    return planeOf(this.shownLayout, this.isFlat);
  }

  /** Move the cross-hair by a voxel. */
  move(direction: Direction, steps: 1 | -1): void {
    const [x, y, z] = this.plane[direction];
    this.niivue.moveCrosshairInVox(steps * x, steps * y, steps * z);
  }

  /** Show intensities from `low` as black to `high` as white; without them as the scan was opened. */
  setWindow([low, high]: readonly [number, number] = this.intensities.usual): void {
    if (this.isClosed || this.scan === null || !(high > low)) return;
    const before = this.window.peek();
    if (before?.low === low && before.high === high) return;
    this.scan.cal_min = low;
    this.scan.cal_max = high;
    if (this.colour) {
      // NiiVue has no window for colours.
      const shown = Uint8Array.from({ length: 256 }, (_, value) => Math.round(255 * Math.min(1, Math.max(0, (value - low) / (high - low)))));
      const pixels = this.scan.img!;
      for (let i = 0; i < this.colour.length; i++) pixels[i] = shown[this.colour[i]!]!;
    }
    this.niivue.refreshLayers(this.scan, 0);
    this.niivue.drawScene();
    this.noteWindow(low, high);
  }

  /** Widen the window and raise its level by a drag on the picture, in pixels. */
  dragWindow(right: number, up: number): void {
    const found = this.window.peek();
    if (found === null) return;
    const step = (found.usual[1] - found.usual[0]) / WINDOW_DRAG;
    const width = Math.max(found.high - found.low + right * step, step);
    const level = (found.low + found.high) / 2 + up * step;
    this.setWindow([level - width / 2, level + width / 2]);
  }

  private noteWindow(low: number, high: number): void {
    this.window.value = { low, high, ...this.intensities };
  }

  /** Enlarge the planes, which keeps a place where it is: the cross-hair, or that at a pixel of the canvas. */
  zoom(times: number, at?: readonly [number, number]): void {
    const { niivue } = this;
    if (this.isClosed || this.scan === null) return;
    const next = Math.min(MOST_ZOOM, Math.max(1, times));
    const [x = 0, y = 0, z = 0, before = 1] = niivue.scene.pan2Dxyzmm;
    const found = at && niivue.canvasPos2frac([at[0] * devicePixelRatio, at[1] * devicePixelRatio]);
    // Outside of the planes NiiVue finds no place, and says so by -1.
    const [i = 0, j = 0, k = 0] = niivue.frac2mm(found && found[0]! >= 0 ? found : niivue.scene.crosshairPos);
    const more = before - next;
    niivue.setPan2Dxyzmm(next === 1 ? [0, 0, 0, 1] : [x + more * i, y + more * j, z + more * k, next]);
    niivue.drawScene();
    this.zoomed.value = next;
    niivue.sync();
  }

  /** Show one of several planes alone, that at a pixel of the canvas, or all of them again. */
  enlarge([x, y]: readonly [number, number]): void {
    if (this.onLayout === null || this.isFlat) return;
    if (this.shownLayout !== "planes") return this.onLayout("planes");
    const { niivue } = this;
    const tile = niivue.screenSlices[niivue.tileIndex(x * devicePixelRatio, y * devicePixelRatio)];
    if (tile !== undefined) this.onLayout(LAYOUT_OF[tile.axCorSag as 0 | 1 | 2] ?? "render");
  }

  /** Whether the left button measures lengths. Off, the lines go. */
  ruler(isOn: boolean): void {
    if (this.isClosed) return;
    const { niivue } = this;
    this.isMeasuring = isOn;
    niivue.setMouseEventConfig(isOn ? { ...MOUSE, leftButton: { primary: DRAG_MODE.measurement } } : MOUSE);
    if (!isOn) niivue.clearMeasurements();
    niivue.drawScene();
  }

  /** The picture on the canvas, as PNG. */
  async picture(): Promise<Blob> {
    // What was drawn before is gone from the canvas's buffer.
    this.niivue.drawScene();
    return await new Promise((resolve, reject) =>
      this.canvas.toBlob((found) => (found ? resolve(found) : reject(new Error("The browser could not save the picture."))), "image/png"),
    );
  }

  /** The scan's intensities under each value of a mask on its grid. Null for a picture in colour, or another grid. */
  statistics(mask: NVImage): Map<number, Statistics> | null {
    if (this.scan === null || this.colour !== null) return null;
    const [slope, intercept] = [this.scan.hdr?.scl_slope || 1, this.scan.hdr?.scl_inter || 0];
    return statisticsOf(this.scan.img2RAS(), mask.img2RAS(), slope, intercept);
  }

  /** Null where no scan is open. */
  get sight(): Sight | null {
    const found = this.window.peek();
    if (found === null) return null;
    const { pan2Dxyzmm, crosshairPos } = this.niivue.scene;
    return { window: [found.low, found.high], pan: [...pan2Dxyzmm], crosshair: [...crosshairPos] };
  }

  /** See a scan as another viewer of it did. */
  see({ window, pan, crosshair }: Sight): void {
    this.setWindow(window);
    this.niivue.setPan2Dxyzmm([...pan] as [number, number, number, number]);
    this.zoomed.value = pan[3]!;
    this.crosshairTo([...crosshair] as Niivue["scene"]["crosshairPos"]);
  }

  /** Show or replace an overlay, which `read` has read. */
  overlay(name: OverlayName, image: NVImage, opacity: number, colours?: ColourTable): void {
    // Files take a while to read, and the viewer may have been closed.
    if (this.isClosed) return;
    // Below its least value the map is transparent.
    if (name === "uncertainty") {
      // Readers of NIfTI differ where a header has two positions; the map is on the scan's own grid.
      if (this.scan !== null) image.setAffine(this.scan.getAffine());
      image.colormap = "plasma";
      image.cal_min = 5;
      image.cal_max = 100;
    }
    if (colours) image.setColormapLabel(colours);
    if (colours && name === "mask") this.maskTable = colours;
    image.opacity = opacity;
    this.overlays.set(name, image);
    this.drawOverlays();
  }

  /** Show where two masks on one grid differ by the names of their values: the values of `DIFFERENCE`. */
  difference(one: NamedMask, other: NamedMask, opacity: number): void {
    const image = one.image;
    const a = image.img!;
    const b = other.image.img!;
    const same = translation(other.names, one.names);
    for (let i = 0; i < a.length; i++) a[i] = a[i] === same[b[i]!] ? 0 : b[i] === 0 ? 1 : a[i] === 0 ? 2 : 3;
    this.overlay("difference", image, opacity, {
      R: [0, ...DIFFERENCE.map((each) => each.colour[0])],
      G: [0, ...DIFFERENCE.map((each) => each.colour[1])],
      B: [0, ...DIFFERENCE.map((each) => each.colour[2])],
      A: [0, ...DIFFERENCE.map(() => 255)],
      I: [0, ...DIFFERENCE.map((each) => each.value)],
      labels: ["", ...DIFFERENCE.map((each) => each.words)],
    });
  }

  /** Read a file, by the end of its name (NIfTI or NRRD), without showing it. */
  async read(found: Blob | ArrayBuffer, file: string): Promise<NVImage> {
    return await volume(found, file);
  }

  /** A mask on the scan's grid as .nii.gz. */
  async nifti(mask: Blob, name: string): Promise<Blob> {
    const content = await (await volume(mask, name)).saveToUint8Array("mask.nii.gz");
    return new Blob([content as Uint8Array<ArrayBuffer>]);
  }

  removeOverlay(name: OverlayName): void {
    if (this.overlays.delete(name)) this.drawOverlays();
  }

  /** Colour an overlay's values, which are labels. */
  colours(name: OverlayName, table: ColourTable): void {
    const found = this.overlays.get(name);
    if (found === undefined) return;
    found.setColormapLabel(table);
    if (name === "mask") this.maskTable = table;
    this.drawOverlays();
  }

  opacity(name: OverlayName, value: number): void {
    const found = this.overlays.get(name);
    if (found === undefined) return;
    found.opacity = value;
    this.drawOverlays();
  }

  /** Draw the border of the mask alone, as wide as a pixel of the screen, or all of it. */
  outlines(isOn: boolean): void {
    if (this.isClosed || this.isOutlined === isOn) return;
    this.isOutlined = isOn;
    if (this.overlays.size > 0) this.drawOverlays();
  }

  /**
   * Draw the overlays, in a fixed order, whenever each arrived.
   *
   * NiiVue's own calls draw the scan's texture and its gradients again for every change, which takes seconds for a
   * large volume without a graphics card.
   */
  private drawOverlays(): void {
    const { niivue } = this;
    if (this.scan === null) return;
    this.drawOutlines();
    niivue.overlays = ORDER.flatMap((each) => this.overlays.get(each) ?? []);
    niivue.volumes = [this.scan, ...niivue.overlays];
    // Without overlays there is no layer that would say so to the shaders.
    if (niivue.overlays.length === 0) return niivue.updateGLVolume();
    const mask = this.outlined;
    const filled = mask?.opacity;
    if (mask) mask.opacity = 0;
    niivue.overlays.forEach((each, index) => niivue.refreshLayers(each, index + 1));
    if (mask) mask.opacity = filled!;
    niivue.drawScene();
  }

  /** NiiVue outlines a drawing alone, so that the mask becomes one, which nobody draws on. */
  private drawOutlines(): void {
    const { niivue } = this;
    const mask = (this.isOutlined && this.overlays.get("mask")) || null;
    if (mask !== this.outlined) {
      this.outlined = mask !== null && niivue.loadDrawing(mask) ? mask : null;
      if (mask === null) niivue.closeDrawing();
    }
    if (this.outlined) this.drawingColours(this.maskTable, 0, true);
  }

  /** The colours of what is drawn, by its values; `isOutlined`: at its border alone. */
  drawingColours(table: ColourTable, opacity: number, isOutlined: boolean): void {
    const { niivue } = this;
    niivue.drawLut = cmapper.makeDrawLut({ ...table, min: 0, max: table.I.length - 1 });
    niivue.drawRimOpacity = isOutlined ? 1 : -1;
    niivue.refreshColormaps();
    niivue.setDrawOpacity(isOutlined ? UNSEEN : opacity);
  }

  /** Move the cross-hair to a voxel, by its indices in the scan's file. */
  moveTo([i, j, k]: readonly [number, number, number]): void {
    const affine = this.scan?.hdr?.affine;
    if (affine === undefined) return;
    const { niivue } = this;
    // By way of millimetres: NiiVue's own voxels are in canonical order, not in the file's. `true`: not those of
    // the straightened volume, which differ where the scan is oblique.
    const [x, y, z] = affine.map((row) => row[0]! * i + row[1]! * j + row[2]! * k + row[3]!);
    this.crosshairTo(niivue.mm2frac([x!, y!, z!], 0, true));
  }

  private crosshairTo(place: Niivue["scene"]["crosshairPos"]): void {
    this.niivue.scene.crosshairPos = [...place] as typeof place;
    this.niivue.createOnLocationChange();
    this.niivue.drawScene();
  }

  /** Move both viewers' cross-hairs and windows together. The other one begins where this one is. */
  link(other: Viewer): void {
    other.leader = this;
    this.niivue.broadcastTo([other.niivue], { "2d": true, "3d": true });
    other.niivue.broadcastTo([this.niivue], { "2d": true, "3d": true });
    const follows = (one: Viewer, another: Viewer) =>
      one.window.subscribe((found) => found && another.hasScan && another.setWindow([found.low, found.high]));
    this.links = [follows(this, other), follows(other, this)];
  }

  unlink(): void {
    this.links.forEach((stop) => stop());
    this.links = [];
    this.niivue.broadcastTo([]);
  }
}

/** Give a mask's values those that have their names in another task; a value without a name there becomes 0. */
export function renamed(mask: NVImage, from: Names, to: Names): NVImage {
  const same = translation(from, to);
  const voxels = mask.img!;
  for (let i = 0; i < voxels.length; i++) voxels[i] = Math.max(0, same[voxels[i]!]!);
  return mask;
}

/** The values of `to` that have the names of the values of `from`, by the latter; -1 for a name without one. */
function translation(from: Names, to: Names): Int16Array {
  const values = new Map(Object.entries(to).map(([name, value]) => [setOf(name), value]));
  const found = new Int16Array(256).fill(-1);
  found[0] = 0;
  for (const [name, value] of Object.entries(from)) found[value] = values.get(setOf(name)) ?? -1;
  return found;
}

/** Tasks name their overlapping labels in an order of their own: `disc + cup`. */
const setOf = (name: string) => name.split(" + ").sort().join(" + ");

/** NiiVue's own ranges leave out much of a small scan. */
function intensitiesOf(image: NVImage): Intensities {
  const voxels = image.img!;
  const [slope, intercept] = [image.hdr?.scl_slope || 1, image.hdr?.scl_inter || 0];
  let [low, high] = [Infinity, -Infinity];
  for (let i = 0; i < voxels.length; i++) {
    const value = voxels[i]!;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (!(high > low)) return { least: intercept, most: intercept + 1, usual: [intercept, intercept + 1] };
  const step = Math.ceil(voxels.length / MOST_SAMPLES);
  const sampled = Float64Array.from({ length: Math.ceil(voxels.length / step) }, (_, i) => voxels[i * step]!).filter(Number.isFinite).sort();
  const at = (share: number) => sampled[Math.round(share * (sampled.length - 1))]!;
  const scaled = (value: number) => value * slope + intercept;
  // A slope may be negative.
  const ordered = (one: number, other: number) => [Math.min(one, other), Math.max(one, other)] as const;
  const [least, most] = ordered(scaled(low), scaled(high));
  const usual = ordered(scaled(at(EXTREMES)), scaled(at(1 - EXTREMES)));
  return { least, most, usual: usual[1] > usual[0] ? usual : [least, most] };
}

async function volume(found: Blob | ArrayBuffer, name: string): Promise<NVImage> {
  const file = new File([found], name);
  // NiiVue chooses its reader by the name, and unpacks by the content.
  try {
    return await NVImage.loadFromFile({ file, name });
  } catch {
    // Its own words name none of its causes.
    throw new Error("The browser could not read the volume: its file is damaged, or larger than the browser's memory.");
  }
}
