"""Measures on one GPU, in minutes, what of this project it can run: `bash tools/gpu.sh --help`.

__main__.py  the command line
runner.py    parts one after another, each in a process of its own, within the time that there is
part.py      that process
record.py    what a part leaves: checks, figures, notes
results.py   the file of results, which a second run continues
page.py      the page of it
parts/       a module each
"""
