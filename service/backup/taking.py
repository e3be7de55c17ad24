"""Take a backup while the service runs.

The database is copied first, then the files that it names, then the store: so a file that the copy names may
have been deleted meanwhile, which is noted, and none is missing that was written before.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from model_store.copies import stored_files
from model_store.digest import sha256
from service.about import locum_version
from service.audit import trail
from service.backup.databases import copied
from service.backup.folder import FILES, STORE, Manifest, writer_of
from service.cohorts.files import COHORTS
from service.cohorts.intake import UID_KEY
from service.corrections.kept_answers import ANSWERS
from service.database import (
    Cohort,
    CohortMask,
    CohortScan,
    Database,
    Job,
    KeptAnswer,
    ViewerScanRow,
    is_current,
)
from service.database.schema import head
from service.errors import BackupError, FileDamaged
from service.files import Files
from service.jobs.files import JOBS
from service.settings import Settings
from service.viewers.scans import VIEWERS


def take(settings: Settings, folder: Path) -> Manifest:
    """Write a backup into a new or empty folder, or into a new file that is named `….tar`. Others write to
    database, files and store meanwhile.

    Raises:
        BackupError: there is something already, or the database cannot be copied.
        DatabaseUnavailable, FilesUnavailable, StoreUnavailable, OSError.
    """
    database, files, store = (
        Database(settings.resolved_database_url),
        settings.open_files(),
        settings.open_store(),
    )
    try:
        if database.file is not None and not database.file.is_file():
            raise BackupError(
                f"{database.file}: expected the service's database, found none: name its folder with "
                "--state-dir (LOCUM_STATE_DIR)"
            )
        if not is_current(database):
            raise BackupError(
                "the database has the schema of another version of Locum: back it up with that version, or "
                "start this one, which migrates it"
            )
        with writer_of(folder) as writer:
            gone: list[str] = []
            unreadable: dict[str, str] = {}
            with copied(database, writer.scratch) as (name, session):
                newest = str(trail.head(session))
                for key in _named(session, files):
                    try:
                        content = files.read(key)
                    except FileDamaged as error:
                        unreadable[FILES + key] = str(error)
                        continue
                    if content is None:
                        gone.append(key)
                    elif (
                        key.startswith(f"{COHORTS}/")
                        and sha256(content) != f"sha256:{key.rpartition('/')[2]}"
                    ):
                        unreadable[FILES + key] = "it was changed where it is stored since its upload"
                    else:
                        writer.add(FILES + key, content)
            writer.written(name)
            with database.read() as session:
                still = set(_named(session, files)) if gone else set()
            for key in [each for each in gone if each in still]:
                gone.remove(key)
                unreadable[FILES + key] = "it is not stored any more, although the database names it"
            for file in stored_files(store):
                if file.content is None:
                    unreadable[STORE + file.path] = file.why
                else:
                    writer.add(STORE + file.path, file.content, file.modified)
            return writer.finish(
                locum=locum_version(),
                revision=head(),
                database="sqlite" if database.is_sqlite else "postgresql",
                trail=newest,
                gone=gone,
                unreadable=unreadable,
            )
    finally:
        database.dispose()


def _named(session: Session, files: Files) -> Iterator[str]:
    """Keys of the files that the rows of the database name. A job's and a kept answer's are those that it has
    now.
    """
    for table in (CohortScan, CohortMask):
        query = select(table.cohort, table.sha256).join(Cohort, Cohort.id == table.cohort)
        found = session.execute(query.where(Cohort.deleted_at.is_(None)).distinct())
        yield from (f"{COHORTS}/{cohort}/{digest}" for cohort, digest in found.all())
    yield from (f"{VIEWERS}/{number}/scan" for number in session.scalars(select(ViewerScanRow.id)).all())
    answers = set(session.scalars(select(KeptAnswer.id)))
    for name in files.names(ANSWERS) if answers else ():
        if name.partition("/")[0] in answers and not name.rpartition("/")[2].startswith("."):
            yield f"{ANSWERS}/{name}"
    jobs = set(session.scalars(select(Job.id)))
    for job, _ in files.folders(JOBS):
        if job in jobs:
            for name in files.names(f"{JOBS}/{job}"):
                if not name.rpartition("/")[2].startswith("."):
                    yield f"{JOBS}/{job}/{name}"
    if files.read(UID_KEY) is not None:
        yield UID_KEY
