"""The registry's tools: audit, pages, probes, and the life of an entry."""
