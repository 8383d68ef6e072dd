"""Fixtures for the tests of pictures."""

import pytest

from common.evaluation import curves


@pytest.fixture
def figures(monkeypatch):
    """Returns a list to which each saved figure is added."""
    saved, save = [], curves.save_figure
    monkeypatch.setattr(
        curves, "save_figure", lambda figure, path: saved.append(figure) or save(figure, path)
    )
    return saved
