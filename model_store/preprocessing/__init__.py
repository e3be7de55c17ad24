"""Preprocess scans for the network, and map its probabilities to a mask on the scan's own grid.

Training and serving both use this package, so their preprocessing cannot differ. It needs NumPy, SciPy and
Pillow only.

    prepare        scan -> slices [S, C, H, W] float32 and the geometry for the way back
    prepare_for    the same, or `prepare_volume`, as the task says
    prepare_mask   mask -> class indices [S, H, W] of the same slices
    by_labels      mask with named segments -> with the task's values
    class_map      mask -> class indices on its own grid; `classes_on` turns them to the scan's
    label_values   mask -> its values; check_values compares them with a task, check_grid checks its grid
    answer         a prepared scan and a way to run the network -> class indices on the scan's own grid, as
                   they are served and scored; `windowed` and `finish` are its parts
    restore        probabilities [S, K, H, W] -> class indices on the scan's own grid
    Restorer       the same, batch by batch; check_restorable rejects volumes that need too much memory
    keep_largest   class indices -> the largest component of each label that the task says
    display_slices the slices for display, at the scan's own resolution
    display_image  an image for display, without a task
    to_slices      a mask on the scan's own grid -> the same slices
    onto_slices    class indices on the scan's own grid -> on the network's slices; `onto_grid`: of a volume

For tasks of volumes (`Task.is_volume`):

    join_channels        channels that are files of their own -> one scan
    grid_of              scan -> its grid for the network, before it is prepared
    price_of             scan -> its voxels, windows and cost on the network's grid, before it is prepared
    prepare_volume       scan -> [C, X, Y, Z] float32 on the network's grid, and that grid
    prepare_volume_mask  mask -> class indices [X, Y, Z] of the same voxels
    windows              where a network's windows start, their weights, and the average over them (`slide`)
    VolumeRestorer       planes of probabilities or logits -> class indices on the scan's own grid
"""

from model_store.preprocessing.answers import answer, finish, outputs_of, prepare_for, windowed
from model_store.preprocessing.components import keep_largest
from model_store.preprocessing.display import DisplaySlices, display_image, display_slices, to_slices
from model_store.preprocessing.forward import Prepared, prepare
from model_store.preprocessing.geometry import Geometry, geometry_of
from model_store.preprocessing.grid import VolumeGrid, volume_grid
from model_store.preprocessing.masks import (
    align,
    check_grid,
    check_values,
    class_map,
    classes_on,
    label_values,
    onto_slices,
    prepare_mask,
)
from model_store.preprocessing.price import Price, price_of
from model_store.preprocessing.restore import PercentRestorer, Restorer, check_restorable, restore
from model_store.preprocessing.segments import BY_NUMBER, by_labels, by_numbers
from model_store.preprocessing.volume_restore import (
    PercentVolumeRestorer,
    VolumeRestorer,
    check_volume_restorable,
    slab_axis_of,
)
from model_store.preprocessing.volumes import (
    PreparedVolume,
    grid_of,
    join_channels,
    onto_grid,
    prepare_volume,
    prepare_volume_mask,
)

__all__ = [
    "BY_NUMBER",
    "DisplaySlices",
    "Geometry",
    "PercentRestorer",
    "PercentVolumeRestorer",
    "Prepared",
    "PreparedVolume",
    "Price",
    "Restorer",
    "VolumeGrid",
    "VolumeRestorer",
    "align",
    "answer",
    "by_labels",
    "by_numbers",
    "check_grid",
    "check_restorable",
    "check_values",
    "check_volume_restorable",
    "class_map",
    "classes_on",
    "display_image",
    "display_slices",
    "finish",
    "geometry_of",
    "grid_of",
    "join_channels",
    "keep_largest",
    "label_values",
    "onto_grid",
    "onto_slices",
    "outputs_of",
    "prepare",
    "prepare_for",
    "prepare_mask",
    "prepare_volume",
    "prepare_volume_mask",
    "price_of",
    "restore",
    "slab_axis_of",
    "to_slices",
    "volume_grid",
    "windowed",
]
