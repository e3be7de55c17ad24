"""HTML pages of a finished run: a report without patients' data, and overlay pages for each site itself."""

from __future__ import annotations

from training.report.overlays import write_overlays
from training.report.page import judged_in_words, write_report
from training.report.site_pages import write_site_pages

__all__ = ["judged_in_words", "write_overlays", "write_report", "write_site_pages"]
