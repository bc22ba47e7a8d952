"""Which commit a run says it came from."""

import subprocess
from pathlib import Path

from portattn.source_tree import source_commit, source_commit_text


def test_the_commit_is_the_trees_and_new_files_make_it_dirty(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        author = ("-c", "user.name=a", "-c", "user.email=a@b.example")
        return subprocess.run(["git", *author, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    (tmp_path / "portattn").mkdir()
    for folder in ("backends", "quirks"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("")
    package = tmp_path / "portattn"
    (package / "__init__.py").write_text("")
    assert source_commit(package) == ("", False)  # no repository, or one that is above the tests' folder
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "one")
    head = git("rev-parse", "HEAD").strip()
    assert source_commit(package) == (head, False)
    (tmp_path / "notes.txt").write_text("no part of the code")
    assert (source_commit(package), source_commit_text(package)) == ((head, False), head)
    (tmp_path / "quirks" / "new.toml").write_text("")
    assert (source_commit(package), source_commit_text(package)) == ((head, True), f"{head}+changes")
    (tmp_path / "inside" / "portattn" / "backends").mkdir(parents=True)  # installed into somebody else's repository
    assert source_commit(tmp_path / "inside" / "portattn") == ("", False)
