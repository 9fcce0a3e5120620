"""Measures, in minutes, what one GPU can run of this project: `bash tools/gpu.sh --help`.

__main__.py  the command line
runner.py    runs the parts one after another, each in a process of its own, within the time limit
part.py      the process of a part
record.py    writes what a part finds: checks, figures, notes
results.py   the file of results, which a second run continues
page.py      the page of the results
parts/       a module for each part
"""
