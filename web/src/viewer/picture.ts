/** Pictures (PNG) as arrays, for the viewer. */
import { pictureVolume } from "./nifti";
import { pictureNrrd } from "./nrrd";
import { greyPng } from "./png";

/** A side of a texture in every browser with WebGL 2; a larger picture is shown smaller. */
const LARGEST_SIDE = 2048;

/** One slice with the picture: in colour, unless all of it is grey. */
export async function scanOfPicture(file: Blob): Promise<ArrayBuffer> {
  const { data, width, height } = await decoded(file, true, LARGEST_SIDE);
  if (isGrey(data)) return pictureVolume(redsOf(data), width, height, 1);
  const pixels = new Uint8Array(width * height * 3);
  for (let from = 0, to = 0; from < data.length; from += 4) {
    pixels[to++] = data[from]!;
    pixels[to++] = data[from + 1]!;
    pixels[to++] = data[from + 2]!;
  }
  return pictureVolume(pixels, width, height, 3);
}

/** One slice with the values of a mask's PNG. */
export async function maskOfPicture(file: Blob): Promise<ArrayBuffer> {
  const { pixels, width, height } = await reds(file, LARGEST_SIDE);
  return pictureVolume(pixels, width, height, 1);
}

/** A mask's PNG as NRRD, at its own size. */
export async function nrrdOfPicture(file: Blob): Promise<Blob> {
  const { pixels, width, height } = await reds(file, Infinity);
  return pictureNrrd(new Uint8Array(pixels), width, height);
}

/**
 * The mask of a picture at its own size, from a drawing on the picture as it is shown.
 *
 * A picture that is shown smaller keeps the pixels of the mask `before` where the drawing did not change.
 */
export async function maskAtOwnSize(picture: Blob, before: Blob | null, drawn: Uint8Array): Promise<Blob> {
  const bitmap = await createImageBitmap(picture);
  const { width, height } = bitmap;
  bitmap.close();
  const [columns, rows] = shownSize(width, height, LARGEST_SIDE);
  if (columns === width) return await greyPng(drawn, width, height);
  const whole = before ? (await reds(before, Infinity)).pixels : new Uint8Array(width * height);
  const begun = before ? (await reds(before, LARGEST_SIDE)).pixels : new Uint8Array(columns * rows);
  for (let y = 0; y < height; y++) {
    const row = Math.floor(((y + 0.5) * rows) / height) * columns;
    for (let x = 0; x < width; x++) {
      const from = row + Math.floor(((x + 0.5) * columns) / width);
      if (drawn[from] !== begun[from]) whole[y * width + x] = drawn[from]!;
    }
  }
  return await greyPng(whole, width, height);
}

async function reds(file: Blob, largest: number): Promise<{ pixels: Uint8Array; width: number; height: number }> {
  const { data, width, height } = await decoded(file, false, largest);
  return { pixels: redsOf(data), width, height };
}

/** The red channel of RGBA. */
function redsOf(data: Uint8ClampedArray): Uint8Array {
  const pixels = new Uint8Array(data.length / 4);
  for (let i = 0; i < pixels.length; i++) pixels[i] = data[4 * i]!;
  return pixels;
}

function isGrey(data: Uint8ClampedArray): boolean {
  for (let i = 0; i < data.length; i += 4) if (data[i] !== data[i + 1] || data[i] !== data[i + 2]) return false;
  return true;
}

function shownSize(width: number, height: number, largest: number): [number, number] {
  const scale = Math.min(1, largest / Math.max(width, height));
  return [Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale))];
}

async function decoded(file: Blob, smooth: boolean, largest: number): Promise<ImageData> {
  const bitmap = await createImageBitmap(file, { colorSpaceConversion: "none", premultiplyAlpha: "none" });
  const [width, height] = shownSize(bitmap.width, bitmap.height, largest);
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d", { willReadFrequently: true, colorSpace: "srgb" })!;
  context.imageSmoothingEnabled = smooth;
  context.drawImage(bitmap, 0, 0, width, height);
  bitmap.close();
  return context.getImageData(0, 0, width, height);
}
