/** An 8-bit grey PNG: a browser's own encoder writes colours, which are no mask. */

const SIGNATURE = [0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a];

/** Encode pixels, row by row from the top. */
export async function greyPng(pixels: Uint8Array, width: number, height: number): Promise<Blob> {
  const header = new Uint8Array(13);
  const view = new DataView(header.buffer);
  view.setUint32(0, width);
  view.setUint32(4, height);
  header[8] = 8; // bits of grey; the other fields are 0
  // Before each row the number of its filter: none.
  const rows = new Uint8Array((width + 1) * height);
  for (let y = 0; y < height; y++) rows.set(pixels.subarray(y * width, (y + 1) * width), y * (width + 1) + 1);
  const deflated = new Blob([rows]).stream().pipeThrough(new CompressionStream("deflate"));
  const data = new Uint8Array(await new Response(deflated).arrayBuffer());
  const parts = [chunk("IHDR", header), chunk("IDAT", data), chunk("IEND", new Uint8Array())];
  return new Blob([new Uint8Array(SIGNATURE), ...parts], { type: "image/png" });
}

function chunk(kind: string, data: Uint8Array): Uint8Array<ArrayBuffer> {
  const found = new Uint8Array(12 + data.length);
  const view = new DataView(found.buffer);
  view.setUint32(0, data.length);
  for (let i = 0; i < 4; i++) found[4 + i] = kind.charCodeAt(i);
  found.set(data, 8);
  view.setUint32(8 + data.length, crc32(found.subarray(4, 8 + data.length)));
  return found;
}

function crc32(bytes: Uint8Array): number {
  let crc = 0xffffffff;
  for (const byte of bytes) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit++) crc = (crc >>> 1) ^ (crc & 1 ? 0xedb88320 : 0);
  }
  return ~crc >>> 0;
}
