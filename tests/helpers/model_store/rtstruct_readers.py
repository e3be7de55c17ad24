"""Read FOLDER/rs.dcm on FOLDER/series by dcmrtstruct2nii and rt-utils, in an interpreter that has them.

FOLDER/found.json has by reader and ROI the file with the mask: a NIfTI, or an array [rows, columns, slices].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from dcmrtstruct2nii import dcmrtstruct2nii
from rt_utils import RTStructBuilder

for folder in map(Path, sys.argv[1:]):
    structures, series, out = str(folder / "rs.dcm"), str(folder / "series"), folder / "masks"
    out.mkdir()
    dcmrtstruct2nii(
        structures, series, str(out), gzip=False, convert_original_dicom=False, mask_foreground_value=1
    )
    nifti = {path.stem.removeprefix("mask_"): str(path) for path in out.glob("mask_*.nii")}
    rt, arrays = RTStructBuilder.create_from(series, structures), {}
    for name in rt.get_roi_names():
        np.save(out / f"{name}.npy", rt.get_roi_mask_by_name(name))
        arrays[name] = str(out / f"{name}.npy")
    (folder / "found.json").write_text(json.dumps({"dcmrtstruct2nii": nifti, "rt-utils": arrays}))
