"""Records of a merge: manifest, model card, verification, comparison, pages."""

from __future__ import annotations

from actmat.report.card import model_card
from actmat.report.manifest import build_manifest, read_manifest, write_manifest
from actmat.report.totals import Totals, recorded_totals, sum_records
from actmat.report.verify import Verification, verify

__all__ = [
    "Totals",
    "Verification",
    "build_manifest",
    "model_card",
    "read_manifest",
    "recorded_totals",
    "sum_records",
    "verify",
    "write_manifest",
]
