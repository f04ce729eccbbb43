"""Tools for proving a backward right: an independent oracle and the comparison against it."""
