"""`portattn tune`: search launch and lowering choices, and write them down as data."""
