"""A host of agents whose interpreters say that they are restricted and are not.

It runs in the place of `engine/boot.py`, with the same arguments; `boot` in the host's configuration is the path of
that file.
"""

import importlib
import json
import os
import runpy
import sys

if __name__ == "__main__":
    runpy.run_path(json.loads(os.environ["GVPO_HOST"])["boot"])["load_package"]()
    from gvpo_trl import sandbox

    sandbox.restrict = lambda **options: sandbox.probe().layers
    importlib.import_module(sys.argv.pop(1)).main()
