"""Runs are found by id, by a unique prefix, by `latest`, by path; what is not found gets one clear line."""

from pathlib import Path

import pytest

from hpcmoe.errors import UserError
from hpcmoe.runs.journal import Journal
from hpcmoe.runs.registry import find_run, list_runs, new_run_id


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for run_id in ("kaa111", "kab222", "zzz333"):
        (tmp_path / run_id).mkdir()
        Journal(tmp_path / run_id / "events.jsonl").append("planned", run_id=run_id)
    (tmp_path / ".draft.new").mkdir()
    (tmp_path / "sweeps").mkdir()
    return tmp_path


def test_runs_are_listed_in_the_order_of_their_birth(root: Path) -> None:
    assert [run.run_id for run in list_runs(root)] == ["kaa111", "kab222", "zzz333"]


@pytest.mark.parametrize(("word", "run_id"), [("latest", "zzz333"), ("kab222", "kab222"), ("z", "zzz333"), ("kaa", "kaa111")])
def test_a_run_is_found(root: Path, word: str, run_id: str) -> None:
    assert find_run(word, root).run_id == run_id


def test_a_run_is_found_by_its_path(root: Path) -> None:
    assert find_run(str(root / "kab222")).run_id == "kab222"


def test_an_ambiguous_prefix_names_the_candidates(root: Path) -> None:
    with pytest.raises(UserError, match=r"kaa111, kab222.*more letters"):
        find_run("ka", root)


def test_an_unknown_run_gets_the_nearest_name(root: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'kab222'"):
        find_run("kab223", root)


def test_no_runs_at_all_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no runs in .*hpcmoe submit"):
        find_run("latest", tmp_path)


def test_new_ids_start_with_a_letter_and_are_free(root: Path) -> None:
    ids = {new_run_id(root) for _ in range(200)}
    assert len(ids) == 200
    assert all(run_id[0].isalpha() and len(run_id) == 6 and run_id.isalnum() for run_id in ids)
