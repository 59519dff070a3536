"""What everything else rests on: errors, jaxprs, JAX's internals."""
