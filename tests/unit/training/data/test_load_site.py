"""A hospital's own folder gives what the same folder gives inside a federation's."""

from __future__ import annotations

import shutil

import pytest

from training.data.cases import RemoteSite, digest_of_sites
from training.data.federation import load_federation, load_site
from training.data.splits import split_by_patient
from training.errors import FederationError
from training.phantom import phantom_of


@pytest.fixture(scope="module", params=["segmentation", "classification"])
def federation(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    if request.param == "segmentation":
        from training.phantom import write_federation

        write_federation(root, ("aster", "birch"), patients_per_site=2, size=16)
    else:
        phantom_of("classification").write(root)
    return load_federation(root)


def test_folder_elsewhere_gives_the_same_site_and_digests(federation, tmp_path):
    site = federation.sites[1]
    folder = shutil.copytree(federation.root / site.name, tmp_path / "another name")
    alone = load_site(folder, federation.task, site.name)
    assert (alone.name, alone.digest, alone.splits_digest) == (site.name, site.digest, site.splits_digest)
    assert split_by_patient(alone, 3).counts == split_by_patient(site, 3).counts


def test_digest_of_the_federation_is_composed_of_what_hospitals_send(federation):
    remote = [RemoteSite(s.name, s.digest, s.splits_digest, s.counts) for s in federation.sites]
    assert digest_of_sites(federation.task, remote) == federation.digest


def test_changed_file_changes_the_digest(federation, tmp_path):
    site = federation.sites[0]
    folder = shutil.copytree(federation.root / site.name, tmp_path / site.name)
    first, second = site.cases[:2]
    changed = folder / first.image.relative_to(federation.root / site.name)
    shutil.copy(second.image, changed)
    assert load_site(folder, federation.task, site.name).digest != site.digest


def test_all_problems_of_a_folder_are_listed(federation, tmp_path):
    with pytest.raises(FederationError) as caught:
        load_site(tmp_path, federation.task, "birch")
    assert "empty" in str(caught.value)
    with pytest.raises(FederationError, match="expected a folder"):
        load_site(tmp_path / "none", federation.task, "birch")
