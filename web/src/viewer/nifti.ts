/** NIfTI-1 for pictures that have no position of their own, and what the first bytes of a file say. */

const UINT8 = 2;
const RGB24 = 128;
const HEADER = 352;

/** A picture as one slice of a volume, its first row at the top of the viewer. `channels` is 1 or 3. */
export function pictureVolume(pixels: Uint8Array, width: number, height: number, channels: 1 | 3): ArrayBuffer {
  const buffer = new ArrayBuffer(HEADER + pixels.length);
  const view = new DataView(buffer);
  view.setInt32(0, 348, true);
  [3, width, height, 1, 1, 1, 1, 1].forEach((size, i) => view.setInt16(40 + 2 * i, size, true));
  view.setInt16(70, channels === 3 ? RGB24 : UINT8, true);
  view.setInt16(72, 8 * channels, true);
  for (let i = 0; i < 8; i++) view.setFloat32(76 + 4 * i, 1, true);
  view.setFloat32(108, HEADER, true);
  view.setFloat32(112, 1, true);
  view.setInt16(254, 2, true); // sform_code: aligned
  // x to the right, and y upwards from the last row.
  view.setFloat32(280, 1, true);
  view.setFloat32(300, -1, true);
  view.setFloat32(308, height - 1, true);
  view.setFloat32(320, 1, true);
  [0x6e, 0x2b, 0x31, 0].forEach((byte, i) => view.setUint8(344 + i, byte)); // n+1
  new Uint8Array(buffer, HEADER).set(pixels);
  return buffer;
}

/** The voxels of `pictureVolume`. */
export const voxelsOf = (volume: Uint8Array): Uint8Array => volume.subarray(HEADER);

/** What the first bytes of a file say it is; its name decides nothing. */
export type FileKind = "nifti" | "png" | "tiff" | "nrrd" | "metaimage" | "header" | "dicom" | "zip" | "unknown";

export async function kindOf(file: Blob): Promise<FileKind> {
  const head = await headOf(file);
  const text = (from: number, to: number) => String.fromCharCode(...head.subarray(from, to));
  if (text(1, 4) === "PNG") return "png";
  if (text(0, 2) === "PK") return "zip";
  if (text(128, 132) === "DICM") return "dicom";
  if (text(344, 347) === "n+1" || text(4, 7) === "n+2") return "nifti";
  if (text(344, 347) === "ni1" || text(4, 7) === "ni2" || isAnalyze(head)) return "header";
  if (["II*\0", "MM\0*", "II+\0", "MM\0+"].includes(text(0, 4))) return "tiff";
  if (text(0, 7) === "NRRD000") return "nrrd";
  if (text(0, 10) === "ObjectType" || text(0, 5) === "NDims") return "metaimage";
  return "unknown";
}

/** A header (.hdr) of ANALYZE has its own length in front, in either byte order, and nothing behind. */
function isAnalyze(head: Uint8Array): boolean {
  const view = new DataView(head.buffer, head.byteOffset, head.length);
  return head.length === 348 && (view.getInt32(0, true) === 348 || view.getInt32(0, false) === 348);
}

/**
 * Whether the viewer shows a NIfTI as the service reads it: with its position from the same fields, in millimetres, and
 * with all its voxels.
 *
 * The service prefers the sform, the viewer the form with the larger code. Without either they differ too. What a file
 * that ends early lacks, the viewer would show as black; the service rejects it.
 */
export async function isReadAlike(file: Blob): Promise<boolean> {
  const head = await headOf(file);
  if (head.length < 348) return false;
  const view = new DataView(head.buffer, head.byteOffset, head.length);
  const isLittle = view.getInt32(0, true) === 348;
  if (!isLittle && view.getInt32(0, false) !== 348) return false;
  const [qform, sform] = [view.getInt16(252, isLittle), view.getInt16(254, isLittle)];
  const units = view.getUint8(123) & 7;
  const axes = view.getInt16(40, isLittle);
  if (axes < 1 || axes > 7) return false;
  const sides = Array.from({ length: axes }, (_, i) => view.getInt16(42 + 2 * i, isLittle));
  const bytes = view.getFloat32(108, isLittle) + (sides.reduce((one, other) => one * other, 1) * view.getInt16(72, isLittle)) / 8;
  return (sform > 0 ? sform >= qform : qform > 0) && (units === 0 || units === 2) && (await hasBytes(file, bytes));
}

/** Whether a file, or what was compressed to it, has so many bytes. A gzip ends with its content's length, modulo 2^32. */
async function hasBytes(file: Blob, bytes: number): Promise<boolean> {
  const start = new Uint8Array(await file.slice(0, 2).arrayBuffer());
  if (start[0] !== 0x1f || start[1] !== 0x8b) return file.size >= bytes;
  const end = new DataView(await file.slice(-4).arrayBuffer());
  return end.byteLength === 4 && end.getUint32(0, true) === bytes % 2 ** 32;
}

/** The first bytes of a file, or of what was compressed to it. */
async function headOf(file: Blob): Promise<Uint8Array> {
  const head = new Uint8Array(await file.slice(0, 512).arrayBuffer());
  return head[0] === 0x1f && head[1] === 0x8b ? await inflatedHead(file) : head;
}

async function inflatedHead(file: Blob): Promise<Uint8Array> {
  const reader = file.stream().pipeThrough(new DecompressionStream("gzip")).getReader();
  try {
    const { value } = await reader.read();
    return new Uint8Array(value ?? []);
  } catch {
    return new Uint8Array();
  } finally {
    void reader.cancel().catch(() => undefined);
  }
}
