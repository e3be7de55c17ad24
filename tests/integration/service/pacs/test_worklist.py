"""A work item is done by the real service on a real Orthanc: its outputs are what the PACS has."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from locum.demo.service_process import free_port, running_service
from service.settings import Settings
from service.worklist.__main__ import performer_of
from tests.helpers.service.coded import SERIES, STUDY, coded_series, publish_coded
from tests.helpers.service.orthanc import Orthanc, configure
from tests.helpers.service.worklist import Origin, running_origin, workitem
from tests.helpers.waiting import wait_for

DONE, UNKNOWN = "1.2.3.4.1", "1.2.3.4.2"


@pytest.fixture(scope="module")
def origin() -> Iterator[Origin]:
    with running_origin() as found:
        yield found


@pytest.fixture(scope="module")
def settings(
    tmp_path_factory: pytest.TempPathFactory, publish_bright: Any, orthanc: Orthanc, origin: Origin
) -> Iterator[Settings]:
    root = tmp_path_factory.mktemp("worklist")
    publish_coded(root / "store", publish_bright)
    orthanc.add(coded_series())
    pacs = configure(root / "pacs.yaml", orthanc.url, ups=origin.url)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCUM_PACS", str(pacs))
        port = free_port()
        with running_service(root / "store", root / "state", port) as client:
            client.put("/hospitals/dune", json={"name": "Dune"}).raise_for_status()
            worklist = {
                "service": f"http://127.0.0.1:{port}",
                "worklists": {
                    "main": {
                        "pacs": "main",
                        "hospital": "dune",
                        "workitems": [{"value": "LIVER", "scheme": "99NORTH", "model": "coded"}],
                    }
                },
            }
            path = root / "worklist.yaml"
            path.write_text(yaml.safe_dump(worklist))
            yield Settings(store=root / "store", state_dir=root / "performer", pacs=pacs, worklist=path)


def test_item_ends_with_references_to_what_the_pacs_has(
    settings: Settings, origin: Origin, orthanc: Orthanc
) -> None:
    origin.add(workitem(DONE, [(STUDY, SERIES)]))
    origin.add(workitem(UNKNOWN, [(STUDY, "1.2.3.4.99")]))
    performer = performer_of(settings, threading.Event())
    performer.folder.mkdir()

    def over() -> bool:
        performer.look()
        return {origin.state(each) for each in (DONE, UNKNOWN)} <= {"COMPLETED", "CANCELED"}

    wait_for(over, patience_s=120)
    assert (origin.state(DONE), origin.state(UNKNOWN)) == ("COMPLETED", "CANCELED")
    (step,) = origin.items[DONE].UnifiedProcedureStepPerformedProcedureSequence
    (seg,), (report,) = orthanc.instances("SEG"), orthanc.instances("SR")
    named = [
        (
            each.StudyInstanceUID,
            each.SeriesInstanceUID,
            each.ReferencedSOPSequence[0].ReferencedSOPInstanceUID,
        )
        for each in step.OutputInformationSequence
    ]
    assert named == [
        (made.StudyInstanceUID, made.SeriesInstanceUID, made.SOPInstanceUID) for made in (seg, report)
    ]
    with orthanc.rest as client:
        for each in step.OutputInformationSequence:
            place = each.WADORSRetrievalSequence[0].RetrieveURL
            assert place.startswith(orthanc.url)
            client.get(
                place, headers={"Accept": 'multipart/related; type="application/dicom"'}
            ).raise_for_status()
    (progress,) = origin.items[UNKNOWN].ProcedureStepProgressInformationSequence
    assert "no such series" in progress.ReasonForCancellation
