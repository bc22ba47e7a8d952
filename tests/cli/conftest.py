"""Calling the command line in this process."""

from planted import planted as planted
from planted import portattn as portattn
