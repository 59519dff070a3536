"""Bounded device memory: state in host memory is fetched, updated and written back in chunks."""
