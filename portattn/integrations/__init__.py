"""Adapters to other libraries; each is imported and registered only on request."""
