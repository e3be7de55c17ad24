/** Pictures (PNG) as arrays, for the viewer. */
import { pictureVolume } from "./nifti";

/** A side of a texture in every browser with WebGL 2; a larger picture is shown smaller. */
const LARGEST_SIDE = 2048;

/** One slice with the picture, in colour. */
export async function scanOfPicture(file: Blob): Promise<ArrayBuffer> {
  const { data, width, height } = await decoded(file, true);
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
  const { data, width, height } = await decoded(file, false);
  const pixels = new Uint8Array(width * height);
  for (let i = 0; i < pixels.length; i++) pixels[i] = data[4 * i]!;
  return pictureVolume(pixels, width, height, 1);
}

async function decoded(file: Blob, smooth: boolean): Promise<ImageData> {
  const bitmap = await createImageBitmap(file, { colorSpaceConversion: "none", premultiplyAlpha: "none" });
  const scale = Math.min(1, LARGEST_SIDE / Math.max(bitmap.width, bitmap.height));
  const width = Math.max(1, Math.round(bitmap.width * scale));
  const height = Math.max(1, Math.round(bitmap.height * scale));
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d", { willReadFrequently: true, colorSpace: "srgb" })!;
  context.imageSmoothingEnabled = smooth;
  context.drawImage(bitmap, 0, 0, width, height);
  bitmap.close();
  return context.getImageData(0, 0, width, height);
}
