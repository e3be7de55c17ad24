/** In place of the codecs of Zarr. */
export default class NoCodec {
  static fromConfig(): never {
    throw new Error("Zarr is not read here");
  }
}
