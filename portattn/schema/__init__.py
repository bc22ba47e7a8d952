"""Values that are handed on: problems, targets, lowerings, plans, quirks, calls. They decide nothing."""
