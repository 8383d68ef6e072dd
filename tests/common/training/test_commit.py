"""Whose commit is reported."""

import shutil
import subprocess

import pytest

from common.training import model_metadata

pytestmark = pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")


def _git(directory, *arguments):
    who = ["-c", "user.name=x", "-c", "user.email=x@y.z"]
    done = subprocess.run(
        ["git", *who, *arguments], cwd=directory, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_a_tree_has_its_own_commit_and_no_other(tmp_path, monkeypatch):
    """A copy of the project within somebody's repository is at none of its commits."""
    outer, inner, worktree = tmp_path / "outer", tmp_path / "outer" / "project", tmp_path / "worktree"
    inner.mkdir(parents=True)
    (outer / "file").touch()
    _git(outer, "init", "--quiet")
    _git(outer, "add", "file")
    _git(outer, "commit", "--quiet", "--message=x")
    _git(outer, "worktree", "add", "--quiet", worktree)
    head = _git(outer, "rev-parse", "HEAD")

    def commit_of(root):
        monkeypatch.setattr(model_metadata, "ROOT", root)
        return model_metadata.commit.__wrapped__()  # not the one in its cache

    assert commit_of(outer) == commit_of(worktree) == head
    assert commit_of(inner) is None
    monkeypatch.setenv("GIT_DIR", str(outer / ".git"))  # as within a hook of the other repository
    assert commit_of(inner) is None
    (outer / "file").write_text("changed")
    assert commit_of(outer) == f"{head}+"
