"""Records that pass between the rooms: problems, targets, lowerings, plans, quirks and calls."""
