"""Building blocks of all kernels, and what differs between releases of the DSL."""
