"""The pocket data: a small data root in AppWorld's layout, which a program makes from tasks of our own.

AppWorld's interpreter runs `generator.py` through `engine/boot.py`. `generator.py` and `base_data.py` write the data
with AppWorld's own classes. `families/` describes the kinds of tasks and needs the standard library alone, so recipes
and tests read it, too.
"""
