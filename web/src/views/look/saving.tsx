/** What else of an answer is kept as a file: other formats of its mask, and the picture on the stage. */
import { useState } from "preact/hooks";
import { Rejection } from "../../ui/notice";
import { nrrdOfPicture } from "../../viewer/picture";
import type { Viewer } from "../../viewer/viewer";
import { type Answer, dicomOf } from "./asking";
import { prefixOf } from "./result";

const IDENTITY = "A picture has no position: the file's geometry is the identity, in pixels.";

export function Saves({ answer, scan, viewer }: { answer: Answer; scan: { files: readonly Blob[]; flat: boolean; isDicom: boolean }; viewer: Viewer | null }) {
  const [error, setError] = useState<unknown>(null);
  const [busy, setBusy] = useState("");
  const keep = (name: string, make: () => Promise<Blob>) => async () => {
    setBusy(name);
    setError(null);
    try {
      download(prefixOf(scan.files) + name, await make());
    } catch (problem) {
      setError(problem);
    } finally {
      setBusy("");
    }
  };
  const button = (label: string, name: string, make: () => Promise<Blob>, title?: string) => (
    <button type="button" class="button small" title={title} disabled={busy !== ""} onClick={() => void keep(name, make)()}>
      {busy === name ? `${label} …` : label}
    </button>
  );
  return (
    <>
      {!scan.flat && viewer && button("as NIfTI", "mask.nii.gz", async () => await viewer.nifti(answer.mask.file, answer.mask.name))}
      {scan.flat && button("as NRRD", "mask.nrrd", async () => await nrrdOfPicture(answer.mask.file), IDENTITY)}
      {scan.isDicom && button("as DICOM SEG", "mask.dcm", async () => await dicomOf(scan, answer, "dicom-seg"))}
      {scan.isDicom && !scan.flat && button("as RTSTRUCT", "structures.dcm", async () => await dicomOf(scan, answer, "dicom-rtstruct"))}
      {viewer && button("Save the picture", "picture.png", async () => await viewer.picture())}
      <Rejection error={error} />
    </>
  );
}

function download(name: string, content: Blob): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  // The browser reads it after this task.
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
