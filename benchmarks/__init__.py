"""The measurements of this project. Each module is a command: `python -m benchmarks.NAME`."""
