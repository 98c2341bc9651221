"""Helpers that tests of several modules share, and ROOT, the repository's folder."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
