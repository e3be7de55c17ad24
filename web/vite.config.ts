import { fileURLToPath } from "node:url";
import { defineConfig } from "vite";

const NO_CODEC = fileURLToPath(new URL("src/viewer/no-codec.ts", import.meta.url));
// NiiVue and what it is made of.
const NIIVUE = /node_modules[\\/](@niivue|@lukeed|@zarrita|array-equal|gl-matrix|nifti-reader-js|numcodecs|reference-spec-reader|unzipit|uzip-module|zarrita)[\\/]/;

// File names without hashes, so that a build replaces files and Git's history stays small: the service sends
// an entity tag of each file's content.
export default defineConfig({
  base: "./",
  resolve: {
    // Codecs of Zarr, which NiiVue reads and this page does not: 1.4 MB.
    alias: { "numcodecs/blosc": NO_CODEC, "numcodecs/lz4": NO_CODEC, "numcodecs/zstd": NO_CODEC },
  },
  build: {
    outDir: "../service/static",
    emptyOutDir: true,
    target: "es2022",
    modulePreload: false,
    // NiiVue alone is larger than the default limit.
    chunkSizeWarningLimit: 1200,
    // No file as a data: URL in another.
    assetsInlineLimit: 0,
    rolldownOptions: {
      output: {
        entryFileNames: "page/[name].js",
        chunkFileNames: "page/[name].js",
        assetFileNames: "page/[name][extname]",
        // NiiVue in a file of its own, which changes with its version alone.
        codeSplitting: {
          groups: [
            { name: "loading", test: /vite.preload-helper/, priority: 2 },
            // Also without NiiVue: it packs DICOM files.
            { name: "fflate", test: /node_modules[\\/]fflate[\\/]/, priority: 2 },
            { name: "niivue", test: NIIVUE, priority: 1 },
          ],
        },
      },
    },
  },
  server: {
    // `npm run dev` beside a service on its default port.
    proxy: Object.fromEntries(
      ["/segment", "/classify", "/display", "/session", "/models", "/lineage", "/hospitals", "/watch", "/jobs", "/keys", "/health"].map((path) => [
        path,
        "http://127.0.0.1:8000",
      ]),
    ),
  },
});
