"""A backup of database, files and store, taken while the service runs, restored, and rehearsed.

take(settings, folder)             a consistent snapshot in a new folder
restore(folder, settings)          into an empty state folder and store
rehearse(folder, settings)         restored into a temporary folder, verified, and started there
"""

from service.backup.folder import Backup, Manifest
from service.backup.rehearsal import rehearse
from service.backup.restoring import restore
from service.backup.taking import take

__all__ = ["Backup", "Manifest", "rehearse", "restore", "take"]
