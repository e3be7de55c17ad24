"""Models made elsewhere, in and out: MONAI bundles, nnU-Net folders and onnx graphs.

    python -m training.exchange import bundle FOLDER|ZIP     also as python -m model_store import …
    python -m training.exchange export bundle NAME@N --out FOLDER
    python -m training.exchange export nnunet NAME@N --out FOLDER
    python -m training.exchange export onnx NAME@N FILE

A file of a stranger is data here: it is read within limits, and nothing in it is imported, evaluated or
unpickled.

    source.py       files of a folder or a zip file, never unpacked
    config.py       a bundle's configuration without its expressions
    checkpoints.py  tensors of a .pt or .pth file, by weights_only
    bundle.py       a MONAI bundle -> an `Imported`; transforms.py its transforms as fields of the task
    nnunet.py       a folder of nnU-Net v2 -> an `Imported`; nnunet_networks.py its networks and their weights
    graph.py        an onnx file and a task.yaml -> an `Imported`
    imported.py     an `Imported` -> a version in the store
    to_bundle.py    a version -> a MONAI bundle
    to_nnunet.py    a version -> a results folder of nnU-Net v2
    to_onnx.py      a version -> an onnx file, behind its lens
"""
