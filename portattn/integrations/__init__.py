"""Adapters to other libraries. None is imported, and nothing is registered anywhere, until it is asked for."""
