"""Say how far the scans of a folder are from those that a model was trained on: no server and no network.

report.py    every scan measured, one by one, and what follows from it
picture.py   the members' curves and those of the scans, as a card draws them
__main__.py  `locum distance`
"""
