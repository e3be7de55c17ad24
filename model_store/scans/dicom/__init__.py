"""DICOM: the files of a series, one enhanced multi-frame file, or a single image, to a Scan.

    files       a zip or loose files -> headers, read within the limits
    geometry    headers -> the order of the slices and the affine, or a refusal with the measured numbers
    pixels      frames -> intensities
    reading     the three together
    masks       a SEG -> a mask
    contours    a mask in a plane -> closed contours, and back
    structures  an RTSTRUCT and its scan -> a mask

Callers use `model_store.scan`, and `open_series` where they need the headers.
"""
