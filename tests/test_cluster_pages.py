"""Each cluster has a page, the pages say what the profiles say, and links in the docs lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from hpcmoe.resources import resource_dir

ROOT = Path(__file__).resolve().parent.parent
PROFILES = sorted(path.stem for path in (resource_dir("conf") / "cluster").glob("*.yaml"))
found = importlib.util.spec_from_file_location("make_clusters", ROOT / "docs" / "make_clusters.py")
assert found is not None
assert found.loader is not None
make_clusters = importlib.util.module_from_spec(found)
found.loader.exec_module(make_clusters)


@pytest.mark.parametrize("name", PROFILES)
def test_a_clusters_page_says_what_its_profile_says(name: str) -> None:
    page = (ROOT / "docs" / "clusters" / f"{name}.md").read_text(encoding="utf-8")
    assert page == make_clusters.page(name), "run `python docs/make_clusters.py`"


def test_there_is_no_page_without_a_profile_and_the_table_is_the_profiles() -> None:
    assert sorted(path.stem for path in (ROOT / "docs" / "clusters").glob("*.md")) == PROFILES
    index = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    assert index == make_clusters.with_table(index), "run `python docs/make_clusters.py`"


def test_limits_stand_in_the_sites_own_units() -> None:
    assert "| acc |  | 8000 |  | 72:00:00 |" in make_clusters.page("marenostrum5")
    assert "| 1 to 4 |  | 90 | 01:30:00 |" in make_clusters.page("alps")
    assert "| 65 to 256 |" in make_clusters.page("leonardo")


def test_links_in_the_docs_lead_to_files() -> None:
    for document in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
