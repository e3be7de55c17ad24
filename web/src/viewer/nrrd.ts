/** NRRD of a picture's mask. */

/**
 * A mask as one slice, row by row from the top, as ITK and 3D Slicer read the picture itself.
 *
 * A picture has no position: the geometry is the identity, in pixels, and a comment in the file says so.
 */
export function pictureNrrd(pixels: Uint8Array<ArrayBuffer>, width: number, height: number): Blob {
  const header = [
    "NRRD0004",
    "# Mask of a picture, which has no position and no spacing: the geometry is the identity, in pixels.",
    "type: uint8",
    "dimension: 3",
    `sizes: ${width} ${height} 1`,
    "space: left-posterior-superior",
    "space directions: (1,0,0) (0,1,0) (0,0,1)",
    "space origin: (0,0,0)",
    "kinds: domain domain domain",
    "encoding: raw",
    "",
    "",
  ];
  return new Blob([header.join("\n"), pixels]);
}
