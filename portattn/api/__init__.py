"""The public operations: from a caller's arguments to results."""
