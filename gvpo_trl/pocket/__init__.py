"""The pocket data: a small data root in AppWorld's layout, made by a program from tasks of our own.

`generator.py` runs in AppWorld's environment through `engine/boot.py` and writes the data with AppWorld's classes.
`families/` describes the kinds of tasks with the standard library alone; recipes and tests read it, too.
"""
