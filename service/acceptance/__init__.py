"""Acceptance: whether a version does at a hospital what was asked of it, and who decided so.

thresholds.py  what is asked, written before
report.py      the verdict, the canonical JSON of a report, its digest and signature
page.py        the report as one HTML page
decisions.py   who accepted what, and whether a hospital demands an acceptance before an assignment
"""
