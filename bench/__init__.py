"""Benchmarks of qflow: `python -m bench`, from the root of the repository. See `docs/explanation/performance.md`."""
