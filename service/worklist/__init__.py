"""Work items of a worklist (UPS-RS, PS3.18 chapter 11): claimed, done by jobs on the PACS, and reported.

A process of its own, and a client of the API: `python -m service.worklist`.
"""
